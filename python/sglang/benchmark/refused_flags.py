"""Flags that SGLang's benchmarks have and these do not, with what to do instead. Plain data."""

from __future__ import annotations

from typing import Final

_PROFILE: Final = "the server has no profiler: profile steps with python -m sglang.bench_one_batch --profile"
_NO_LORA: Final = "serve a merged checkpoint instead"
_NO_IMAGES: Final = "only text is served: leave it out"
_NO_LOGPROBS: Final = "ask with --extra-request-body '{\"return_logprob\": true}'"
_REPLAY: Final = "replay arrivals from a file with benchmark/spec_toggle/replay.py"
_ONE_SERVER: Final = "a server prefills and decodes in one: leave it out"

_HINTS: Final[dict[str, tuple[str, ...]]] = {
    _PROFILE: (
        "profile", "profile-activities", "profile-start-step", "profile-steps", "profile-num-steps",
        "profile-by-stage", "profile-stages", "profile-output-dir", "profile-prefix", "profile-prefill-url",
        "profile-decode-url",
    ),
    _NO_LORA: ("lora-name", "lora-request-distribution", "lora-zipf-alpha"),
    _NO_IMAGES: (
        "image-count", "image-resolution", "random-image-count", "image-format", "image-content",
    ),
    _NO_LOGPROBS: ("return-logprob", "top-logprobs-num", "token-ids-logprob", "logprob-start-len"),
    _REPLAY: (
        "use-trace-timestamps", "mooncake-slowdown-factor", "mooncake-num-rounds", "mooncake-workload",
        "agentic-max-turns", "dataset-offset",
    ),
    _ONE_SERVER: ("pd-separated", "fake-prefill"),
    "bring the data with --dataset-name openai and --dataset-path": (
        "speed-bench-category", "speed-bench-output-len",
    ),
    "give whole prompts with --dataset-name custom and --dataset-path": ("prompt-suffix",),
    "a group's lengths are fixed and its prompts are shuffled: leave it out": (
        "gsp-range-ratio", "gsp-fast-prepare", "gsp-ordered", "gsp-group-distribution", "gsp-zipf-alpha",
    ),
    "use --dataset-name bfcl for conversations of several turns": ("gsp-num-turns",),
    "leave it out": ("gsp-send-routing-key", "return-routed-experts", "flush-cache-timeout"),
    "--output-details has every request's figures": ("print-requests", "plot-throughput"),
    "read --result-filename": (
        "pydantic-result-filename", "show-report", "no-append-to-github-summary", "server-args-for-metrics",
    ),
    "set --stream-interval on the server": ("client-stream-interval",),
    "give every length with --input-len": ("input-len-step-percentage",),
    "a batch is one request, or several at once with --parallel-batch, and never larger than the server"
    " runs at once": ("enable-multi-batch",),
    "the program ends when it is done: leave it out": ("do-not-exit",),
}  # fmt: skip


def refused_flags() -> dict[str, str]:
    """Option -> one line that says what to do instead."""
    return {
        f"--{name}": f"SGLang's benchmarks have --{name}; these do not: {hint}"
        for hint, names in _HINTS.items()
        for name in names
    }
