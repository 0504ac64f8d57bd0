"""A run's figures on the terminal, under upstream's labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from sglang.benchmark.metrics import Spread, Summary
from sglang.benchmark.outcome import Outcome

_WIDTH: Final = 50
_MOST_ERRORS: Final = 5
Value = str | int | float


def title(text: str, fill: str = "-") -> str:
    return f"{text:{fill}^{_WIDTH}}"


def line(label: str, value: Value) -> str:
    """A float has two digits after the point."""
    shown = f"{value:<10.2f}" if isinstance(value, float) else f"{value!s:<10}"
    return f"{label + ':':<40} {shown}"


def serving_lines(
    backend: str, rate: float, max_concurrency: int | None, summary: Summary, accept_length: float | None
) -> list[str]:
    """What `bench_serving` prints."""
    retokenized = summary.total_output_tokens_retokenized
    rows: list[tuple[str, Value]] = [
        ("Backend", backend),
        ("Traffic request rate", str(rate)),
        ("Max request concurrency", max_concurrency or "not set"),
        ("Successful requests", summary.completed),
        ("Benchmark duration (s)", summary.duration),
        ("Total input tokens", summary.total_input_tokens),
        ("Total input text tokens", summary.total_input_tokens),
        ("Total generated tokens", summary.total_output_tokens),
        ("Total generated tokens (retokenized)", "no tokenizer" if retokenized is None else retokenized),
        ("Request throughput (req/s)", summary.request_throughput),
        ("Input token throughput (tok/s)", summary.input_throughput),
        ("Output token throughput (tok/s)", summary.output_throughput),
        ("Peak output token throughput (tok/s)", summary.max_output_tokens_per_s),
        ("Peak concurrent requests", summary.max_concurrent_requests),
        ("Total token throughput (tok/s)", summary.total_throughput),
        ("Concurrency", summary.concurrency),
    ]
    if accept_length:
        rows.append(("Accept length", float(accept_length)))
    return [
        title(" Serving Benchmark Result ", "="),
        *(line(label, value) for label, value in rows),
        *_spread_lines("End-to-End Latency", "E2E Latency", summary.e2e_latency),
        *_spread_lines("Time to First Token", "TTFT", summary.ttft),
        *_spread_lines("Time per Output Token (excl. 1st token)", "TPOT", summary.tpot),
        *_spread_lines("Inter-Token Latency", "ITL", summary.itl),
        line("Max ITL (ms)", summary.itl.max),
    ]


def _spread_lines(heading: str, name: str, spread: Spread) -> Iterable[str]:
    yield title(heading)
    values = (spread.mean, spread.median, spread.p90, spread.p95, spread.p99)
    for which, value in zip(("Mean", "Median", "P90", "P95", "P99"), values, strict=True):
        yield line(f"{which} {name} (ms)", value)


def cache_figures(outcomes: Sequence[Outcome]) -> dict[str, float | int | None]:
    """``cache_report`` of a JSON line. None: the server does not say (where they lay, or anything)."""
    good = [outcome for outcome in outcomes if outcome.success]
    told = [o.cached_tokens for o in good if o.cached_tokens is not None]
    prompt, cached = sum(o.prompt_len for o in good), sum(told) if told else None
    return {
        "total_prompt_tokens": prompt,
        "total_cached_tokens": cached,
        "cache_hit_rate_pct": round(cached / prompt * 100, 2) if prompt and cached is not None else None,
        "device_cached_tokens": None,
        "host_cached_tokens": None,
        "storage_cached_tokens": None,
        "storage_backend": None,
    }


def cache_lines(figures: dict[str, float | int | None]) -> list[str]:
    rate = figures["cache_hit_rate_pct"]
    cached = figures["total_cached_tokens"]
    return [
        title("Cache Hit Details"),
        line("Total prompt tokens", figures["total_prompt_tokens"] or 0),
        line("Total cached tokens", "not told by the server" if cached is None else cached),
        line("Cache hit rate", "unknown" if rate is None else f"{rate:.1f}%"),
    ]


def failure_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """The first distinct errors, and how often each came; [] without any."""
    errors = Counter(outcome.error for outcome in outcomes if not outcome.success)
    if not errors:
        return []
    lines = [f"{errors.total()} of {len(outcomes)} requests failed, and count nowhere:"]
    lines += [f"  {count} x {error}" for error, count in list(errors.items())[:_MOST_ERRORS]]
    if len(errors) > _MOST_ERRORS:
        lines.append(f"  and {len(errors) - _MOST_ERRORS} other errors (--output-details has them all)")
    return lines
