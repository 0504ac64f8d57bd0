"""Flags that only show where they are used. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.http_server import uvicorn_config
from sglang.srt.entrypoints.watching import make_watching
from sglang.srt.managers import scheduler_process
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError


def resolved(*line: str) -> ServerArgs:
    return ServerArgs.from_command_line(["--model-path", "m", *line]).resolve("LlamaForCausalLM")


def context(args: ServerArgs, **model: Any) -> ServerContext:
    fields: Any = SimpleNamespace(model_type="llama", architecture="LlamaForCausalLM", **model)
    return ServerContext(args, fields, SimpleNamespace(), None, "", 0.0, 0.0)  # type: ignore[arg-type]


def test_the_version_of_the_weights_is_shown() -> None:
    assert context(resolved("--weight-version", "v7")).model_info()["weight_version"] == "v7"


def test_hidden_states_are_for_servers_that_allow_them() -> None:
    assert resolved("--enable-return-hidden-states").enable_return_hidden_states
    assert not resolved().enable_return_hidden_states  # then refused: test_native_api.py


def test_sampling_defaults_are_the_models_or_openais() -> None:
    model = {"sampling_defaults": {"temperature": 0.6}}
    assert context(resolved(), **model).sampling_defaults() == {"temperature": 0.6}
    assert context(resolved("--sampling-defaults", "openai"), **model).sampling_defaults() == {}


def test_a_drafter_may_have_a_load_format_of_its_own() -> None:
    line = [
        "--speculative-algorithm",
        "EAGLE3",
        "--speculative-draft-model-path",
        "d",
        "--load-format",
        "gguf",
    ]
    assert executor_args(resolved(*line)).draft_load_format == "gguf"
    assert (
        executor_args(resolved(*line, "--speculative-draft-load-format", "dummy")).draft_load_format
        == "dummy"
    )


@pytest.mark.parametrize(
    "option", ["--speculative-accept-threshold-single", "--speculative-accept-threshold-acc"]
)
def test_only_exact_verification(option: str) -> None:
    drafter = ["--speculative-algorithm", "NGRAM"]
    assert resolved(*drafter, option, "1.0").speculative_algorithm
    with pytest.raises(ServerArgsError, match=option):
        resolved(*drafter, option, "0.5")


def _remember(made: list[Any]) -> Any:
    def backend_maker(*given: Any) -> object:
        made.append(given)
        return given

    return backend_maker


def test_flags_of_grammars_reach_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(
        scheduler_process, "backend_maker", lambda *given: made.append(given) or (lambda: None)
    )
    monkeypatch.setattr(scheduler_process, "GrammarCompiler", lambda make: make)
    info: Any = SimpleNamespace(vocab_size=10)

    def options(*line: str) -> tuple[str, Any]:
        assert scheduler_process._grammars(resolved(*line), None, info, (1,)) is not None  # type: ignore[arg-type]
        return made[-1][0], made[-1][4]

    assert options()[0] == "xgrammar" and options()[1].any_whitespace
    assert not options("--constrained-json-disable-any-whitespace")[1].any_whitespace
    name, given = options("--grammar-backend", "llguidance", "--constrained-json-whitespace-pattern", " ?")
    assert (name, given.whitespace_pattern) == ("llguidance", " ?")
    none = resolved("--grammar-backend", "none")
    assert scheduler_process._grammars(none, None, info, (1,)) is None  # type: ignore[arg-type]
    with pytest.raises(ServerArgsError, match="needs --grammar-backend llguidance"):
        resolved("--constrained-json-whitespace-pattern", " ?")


def test_spans_go_where_the_flag_says(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    asked: list[str] = []

    def make_exporter(endpoint: str) -> InMemorySpanExporter:
        asked.append(endpoint)
        return InMemorySpanExporter()

    monkeypatch.setattr("sglang.srt.managers.text_traces.make_exporter", make_exporter)
    make_watching(resolved("--enable-trace", "--otlp-traces-endpoint", "collector:1")).close()
    make_watching(resolved("--enable-trace")).close()
    make_watching(resolved("--otlp-traces-endpoint", "collector:1")).close()
    assert asked == ["collector:1", "localhost:4317"]


@pytest.mark.parametrize(
    "level, access", [(None, False), ("warning", False), ("info", True), ("debug", True)]
)
def test_a_line_for_every_http_request_if_asked_for(level: str | None, access: bool) -> None:
    args = resolved() if level is None else resolved("--log-level-http", level)
    config = uvicorn_config(lambda *_: None, args.log_level_http)  # type: ignore[arg-type]
    assert (config.access_log, config.log_level) == (access, level or "warning")


def test_no_key_is_shown() -> None:
    shown = replace(resolved(), api_key="k1", admin_api_key="k2").public_dict()
    assert (shown["api_key"], shown["admin_api_key"]) == ("***", "***")
