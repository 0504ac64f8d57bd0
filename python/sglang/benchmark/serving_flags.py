"""The command line of `bench_serving`: upstream's names and defaults."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from sglang.benchmark.backends import BACKENDS, Backend
from sglang.benchmark.dataset_flags import DatasetFlags, check_dataset_flags
from sglang.benchmark.refused_flags import refused_flags
from sglang.srt.utils.flags import ServerArgsError, flag, parse_flags, refuse_empty

PROG: Final = "python -m sglang.bench_serving"
DESCRIPTION: Final = (
    "Measure a running server over HTTP: throughput, time to the first token, time between tokens."
    " OPENAI_API_KEY, if set, is sent as the key."
)
_SERVER: Final = "server"
_LOAD: Final = "load"
_OUT: Final = "output"
_FOREIGN: Final = "it speaks OpenAI's API: use --backend openai or openai-chat with --base-url"
_UNKNOWN_BACKENDS: Final = {
    **dict.fromkeys(("sglang-embedding", "vllm-embedding"), "only generation is measured"),
    **dict.fromkeys(("lmdeploy", "lmdeploy-chat"), _FOREIGN),
    **dict.fromkeys(("trt", "gserver", "truss"), "put OpenAI's API before it and use --backend openai"),
}
GOODPUT_LIMITS: Final = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServingFlags(DatasetFlags):
    backend: str = flag("sglang", str, _SERVER, f"one of: {', '.join(BACKENDS)}")
    base_url: str | None = flag(None, str, _SERVER, "the server, instead of --host and --port")
    host: str = flag("0.0.0.0", str, _SERVER, "the server's address")
    port: int | None = flag(None, int, _SERVER, "its port (default: 30000 for SGLang, 8000 for vLLM)")
    ready_check_timeout_sec: int = flag(60, int, _SERVER, "wait so long for the server; 0: don't look")
    model: str | None = flag(None, str, _SERVER, "the model's name (default: the first of /v1/models)")
    served_model_name: str | None = flag(None, str, _SERVER, "the name in requests, where not --model's")
    tokenizer: str | None = flag(
        None, str, _SERVER, "folder or name of the tokenizer (default: the server's, else the model's)"
    )
    trust_remote_code: bool = flag(False, bool, _SERVER, "for a tokenizer with code of its own")
    header: tuple[str, ...] | None = flag(None, str, _SERVER, "more HTTP headers, as Name=value", many=True)
    flush_cache: bool = flag(False, bool, _SERVER, "empty the server's prefix cache before the run")

    request_rate: float = flag(math.inf, float, _LOAD, "requests a second (Poisson); inf: all at once")
    max_concurrency: int | None = flag(None, int, _LOAD, "most requests at a time")
    warmup_requests: int = flag(1, int, _LOAD, "requests that are not measured, before the run")
    disable_stream: bool = flag(False, bool, _LOAD, "ask for whole answers")
    disable_ignore_eos: bool = flag(False, bool, _LOAD, "answers may end before their length")
    temperature: float = flag(0.0, float, _LOAD, "of sampling; 0: greedy")
    top_p: float = flag(1.0, float, _LOAD, "of sampling")
    extra_request_body: str | None = flag(None, str, _LOAD, "a JSON object, merged into every request")
    tokenize_prompt: bool = flag(False, bool, _LOAD, "random prompts are sent as token ids")

    output_file: str | None = flag(
        None, str, _OUT, "JSONL; a line is appended (default: named after backend, date and data set)"
    )
    output_details: bool = flag(False, bool, _OUT, "with every request's figures and text")
    disable_tqdm: bool = flag(False, bool, _OUT, "no progress bar")
    cache_report: bool = flag(False, bool, _OUT, "also cached prompt tokens")
    goodput: tuple[str, ...] | None = flag(
        None, str, _OUT, "also requests a second within limits in ms: ttft:200 tpot:50 e2el:5000", many=True
    )
    tag: str | None = flag(None, str, _OUT, "written into the record")

    @property
    def kind(self) -> Backend:
        return BACKENDS[self.backend]

    @property
    def url(self) -> str:
        """Without the /v1 that OpenAI's clients want."""
        if self.base_url:
            return self.base_url.rstrip("/").removesuffix("/v1")
        return f"http://{self.host}:{self.port or self.kind.port}"

    def extra_body(self) -> dict[str, Any]:
        if self.extra_request_body is None:
            return {}
        try:
            found = json.loads(self.extra_request_body)
        except json.JSONDecodeError as error:
            raise ServerArgsError(f"--extra-request-body is not JSON: {error}") from error
        if not isinstance(found, dict):
            raise ServerArgsError(f"--extra-request-body must be a JSON object, got {found!r}")
        return found

    def headers(self) -> dict[str, str]:
        pairs = [word.partition("=") for word in self.header or ()]
        for name, sign, value in pairs:
            if not (name and sign):
                raise ServerArgsError(f"--header must be Name=value, got {name}{sign}{value}")
        return {name: value for name, _, value in pairs}

    def goodput_limits(self) -> dict[str, float]:
        limits = {}
        for word in self.goodput or ():
            name, _, value = word.partition(":")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = math.nan
            if name not in GOODPUT_LIMITS or not limits[name] > 0:
                raise ServerArgsError(
                    f"--goodput takes {', '.join(GOODPUT_LIMITS)} with milliseconds, as ttft:200; got {word}"
                )
        return limits


def parse(argv: Sequence[str]) -> ServingFlags:
    """
    Raises:
        ServerArgsError: the flags can't be taken as they are.
    """
    values = parse_flags(ServingFlags, argv, PROG, DESCRIPTION, refused_flags())
    refuse_empty(ServingFlags, values)
    names = {f.name for f in fields(ServingFlags)}
    flags = ServingFlags(**{name: value for name, value in values.items() if name in names})
    _check(flags)
    return flags


def _check(flags: ServingFlags) -> None:
    if flags.backend not in BACKENDS:
        hint = _UNKNOWN_BACKENDS.get(flags.backend, f"choose one of {', '.join(BACKENDS)}")
        raise ServerArgsError(f"there is no backend {flags.backend} here: {hint}")
    if flags.base_url is None and flags.port is None and flags.kind.port is None:
        raise ServerArgsError(f"--backend {flags.backend} needs --base-url or --port")
    if flags.base_url and not flags.base_url.startswith(("http://", "https://")):
        raise ServerArgsError(f"--base-url must begin with http:// or https://, got {flags.base_url}")
    check_dataset_flags(flags)
    if not flags.request_rate > 0:
        raise ServerArgsError(f"--request-rate must be more than 0, or inf; got {flags.request_rate}")
    if flags.max_concurrency is not None and flags.max_concurrency < 1:
        raise ServerArgsError(f"--max-concurrency must be at least 1, got {flags.max_concurrency}")
    for option, number in (
        ("--warmup-requests", flags.warmup_requests),
        ("--ready-check-timeout-sec", flags.ready_check_timeout_sec),
    ):
        if number < 0:
            raise ServerArgsError(f"{option} must not be negative, got {number}")
    if flags.tokenize_prompt and not flags.dataset_name.startswith("random"):
        raise ServerArgsError("--tokenize-prompt needs --dataset-name random or random-ids")
    if flags.tokenize_prompt and flags.backend.endswith("-chat"):
        raise ServerArgsError("--tokenize-prompt needs a backend that takes token ids, not a chat")
    flags.extra_body(), flags.headers(), flags.goodput_limits()
