"""What is served where no model is named, and what of it can be changed. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from helpers.server import write_tiny_pair

from sglang.embedded.model import EMBEDDED_DISABLE_BS_THRESHOLD, EMBEDDED_MODEL_NAME
from sglang.launch_server import main as launch
from sglang.srt.entrypoints.prepare import StartError, prepare
from sglang.srt.server_args import ServerArgs


def prepared(*flags: str) -> ServerArgs:
    return prepare(ServerArgs.from_command_line(flags)).args


def test_the_embedded_model_speculates_with_a_threshold() -> None:
    args = prepared()
    assert (args.served_model_name, args.enable_metrics) == (EMBEDDED_MODEL_NAME, True)
    shape = (args.speculative_num_steps, args.speculative_eagle_topk, args.speculative_num_draft_tokens)
    assert (args.speculative_algorithm, shape) == ("EAGLE3", (3, 1, 4))
    assert args.speculative_disable_bs_threshold == EMBEDDED_DISABLE_BS_THRESHOLD


def test_what_was_given_stays() -> None:
    args = prepared("--speculative-num-steps", "2", "--speculative-disable-bs-threshold", "0")
    assert (args.speculative_num_steps, args.speculative_num_draft_tokens) == (2, 3)
    assert args.speculative_disable_bs_threshold == 0
    args = prepared("--speculative-algorithm", "none", "--served-model-name", "x")
    assert (args.speculative_algorithm, args.served_model_name) == (None, "x")
    assert args.speculative_draft_model_path is None


def test_a_named_model_gets_nothing_of_that(tmp_path: Path) -> None:
    target, _ = write_tiny_pair(tmp_path)
    args = prepared("--model-path", str(target), "--trust-remote-code")
    assert (args.speculative_algorithm, args.enable_metrics) == (None, False)


@pytest.mark.parametrize(
    "flags, words",
    [
        (("--page-size", "0"), "--page-size"),
        (("--tp-size", "0"), "--tp-size"),
        (("--port", "70000"), "--port"),
        (("--speculative-num-steps", "2", "--speculative-bs-schedule", "1-:3"), "names 3 drafts"),
        (("--speculative-bs-schedule", "2-:3"), "--speculative-bs-schedule"),
        (("--speculative-auto-table", "nowhere"), "nowhere"),
        (("--speculative-algorithm", "none", "--speculative-num-steps", "2"), "needs a drafter"),
        (("--tokenizer-path", "nowhere"), "tokenizer path"),
        (("--chat-template", "chatml"), "Jinja file"),
    ],
)
def test_wrong_flags_are_told_before_anything_is_prepared(
    flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def convert() -> str:
        raise AssertionError("this may take a minute")

    monkeypatch.setattr("sglang.srt.entrypoints.prepare.embedded_model_path", convert)
    with pytest.raises(StartError, match=words):
        prepared(*flags)
    with pytest.raises(SystemExit):
        launch(flags)
    told = capsys.readouterr().err
    assert words in told and "preparing" not in told


def test_a_port_in_use_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sglang.srt.entrypoints.prepare.embedded_model_path", lambda: 1 / 0)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(SystemExit):
        launch(["--port", str(taken.getsockname()[1])])
    assert "can't listen on 127.0.0.1:" in capsys.readouterr().err


def test_errors_are_one_line(tmp_path: Path) -> None:
    target, drafter = write_tiny_pair(tmp_path)
    for flags, words in (
        (("--model-path", str(tmp_path / "nowhere")), "does not exist.*hf download"),
        (("--model-path", str(drafter)), "draft"),
        (("--model-path", str(target), "--tokenizer-path", "nowhere"), "tokenizer path"),
        (("--model-path", str(target), "--chat-template", "chatml"), "chatml.*Jinja file"),
        (("--speculative-draft-model-path", "nowhere"), "--speculative-draft-model-path:.*nowhere"),
        (("--model-path", str(target), "--context-length", "100000"), "context"),
    ):
        with pytest.raises(StartError, match=words) as caught:
            prepared(*flags)
        assert "\n" not in str(caught.value)
