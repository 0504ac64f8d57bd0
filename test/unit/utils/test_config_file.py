"""--config FILE. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError, flags_of, option_name


def given(tmp_path: Path, text: str, *line: str) -> ServerArgs:
    file = tmp_path / "flags.yaml"
    file.write_text(text)
    return ServerArgs.from_command_line(["--config", str(file), *line])


def test_the_command_line_comes_first(tmp_path: Path) -> None:
    text = "port: 1234\nhost: 0.0.0.0\nenable-metrics: true\ntp_size: 2\nmodel: /m\n"
    args = given(tmp_path, text, "--port", "99", "--model-path", "other")
    assert (args.port, args.host, args.enable_metrics, args.tp_size) == (99, "0.0.0.0", True, 2)
    assert args.model_path == "other"
    assert given(tmp_path, text).port == 1234
    assert ServerArgs.from_keywords(config=str(tmp_path / "flags.yaml"), tp_size=1).tp_size == 1


def test_kinds_of_values(tmp_path: Path) -> None:
    text = "served-model-name: 123\ncuda-graph-bs: [1, 2]\nmem-fraction-static: 0.5\n--page-size: 16\n"
    args = given(tmp_path, text + "speculative-disable-bs-threshold: 4\nmax-running-requests:\n")
    assert (args.served_model_name, args.cuda_graph_bs, args.page_size) == ("123", (1, 2), 16)
    assert (args.speculative_disable_bs_threshold, args.max_running_requests) == (4, None)
    assert given(tmp_path, "cuda-graph-bs: 4").cuda_graph_bs == (4,)
    assert given(tmp_path, "").port == 30000


def test_every_flag_can_be_in_the_file(tmp_path: Path) -> None:
    values = {option_name(n).lstrip("-"): d for n, (_, d) in flags_of(ServerArgs).items() if n != "config"}
    args = given(tmp_path, yaml.safe_dump(values))
    assert args == ServerArgs(config=str(tmp_path / "flags.yaml"))


@pytest.mark.parametrize(
    "text, words",
    [
        ("page-sise: 1", "did you mean page_size"),
        ("port: many", "port must be of type int"),
        ("log-level: loud", "log_level must be one of"),
        ("[1, 2]", "must hold flags"),
        ("a: [", "not valid YAML"),
        ("enable-lora: true", "SGLang has --enable-lora"),
        ("tp: 2\ntp-size: 2", "--tp-size twice"),
        ("config: other.yaml", "names another file"),
        ("host: ''", "--host is empty"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ServerArgsError, match=words) as caught:
        given(tmp_path, text)
    assert "flags.yaml" in str(caught.value)


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ServerArgsError, match="nowhere.yaml: No such file"):
        ServerArgs.from_command_line(["--config=nowhere.yaml"])
    with pytest.raises(ServerArgsError, match="--config"):
        ServerArgs.from_command_line(["--config"])


def test_no_file() -> None:
    assert ServerArgs.from_command_line([]) == ServerArgs()
