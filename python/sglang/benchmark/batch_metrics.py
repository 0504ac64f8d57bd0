"""Figures of one static batch from its outcomes: upstream's names. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang.benchmark.outcome import Outcome


@dataclass(frozen=True, slots=True)
class BatchFigures:
    latency: float  # s, until the last token
    input_throughput: float  # tokens/s until the last prompt's first token
    output_throughput: float  # tokens/s from then on
    overall_throughput: float
    last_ttft: float  # s
    total_output_tokens: int
    num_early_stopped: int
    steady_state_output_throughput: float | None  # while all decode; None: they never all did
    steady_state_window_s: float | None
    cache_hit_rate: float | None  # None: the server does not say


def batch_figures(outcomes: Sequence[Outcome], output_len: int) -> BatchFigures:
    """``outcomes``: all succeeded. Times count from the first request's start."""
    began = min(o.started for o in outcomes)
    ended = max(o.started + o.latency for o in outcomes)
    all_begun = max(o.started + o.ttft for o in outcomes)
    first_ended = min(o.started + o.latency for o in outcomes)
    num_in, num_out = sum(o.prompt_len for o in outcomes), sum(o.output_len for o in outcomes)
    window = first_ended - all_begun
    cached = [o.cached_tokens for o in outcomes if o.cached_tokens is not None]
    return BatchFigures(
        latency=ended - began,
        input_throughput=num_in / (all_begun - began),
        output_throughput=_rate(tokens_between(outcomes, all_begun, ended), ended - all_begun) or 0.0,
        overall_throughput=(num_in + num_out) / (ended - began),
        last_ttft=all_begun - began,
        total_output_tokens=num_out,
        num_early_stopped=sum(o.output_len < output_len for o in outcomes),
        steady_state_output_throughput=_rate(tokens_between(outcomes, all_begun, first_ended), window),
        steady_state_window_s=window if window > 0 else None,
        cache_hit_rate=sum(cached) / num_in if cached and num_in else None,
    )


def _rate(tokens: int, seconds: float) -> float | None:
    return tokens / seconds if seconds > 0 else None


def tokens_between(outcomes: Sequence[Outcome], begin: float, end: float) -> int:
    """Tokens that came after ``begin`` and not after ``end``; those of first events are not looked at."""
    slack = 1e-9  # sums of gaps
    return sum(begin + slack < moment <= end + slack for o in outcomes for moment in o.token_times()[1:])
