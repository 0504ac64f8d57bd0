"""Waiting times of streams, and how many ran at once. Pure functions of traces."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmark.spec_toggle.client import StreamTrace


@dataclass(frozen=True, slots=True)
class Latency:
    """What the requests of one run waited for, in seconds."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    gap_p99: float  # between two events, however many tokens they bring
    stream_rate: float  # tokens per second of one request after its first token: the median


def latency_of(traces: Sequence[StreamTrace]) -> Latency:
    """Sum up the waiting times of a run's requests."""
    ttfts = [trace.times[0] - trace.started for trace in traces]
    itls = [gap for trace in traces for gap in token_gaps(trace)]
    gaps = [gap for trace in traces for gap in event_gaps(trace)]
    return Latency(
        ttft_p50=percentile(ttfts, 50),
        ttft_p99=percentile(ttfts, 99),
        itl_p50=percentile(itls, 50),
        itl_p99=percentile(itls, 99),
        gap_p99=percentile(gaps, 99),
        stream_rate=percentile([stream_rate(trace) for trace in traces], 50),
    )


def token_gaps(trace: StreamTrace) -> list[float]:
    """Return the inter-token latencies: an event with k tokens counts as k equal parts of its wait."""
    found: list[float] = []
    for index in range(1, len(trace.times)):
        tokens = trace.counts[index] - trace.counts[index - 1]
        wait = trace.times[index] - trace.times[index - 1]
        found += [wait / tokens] * tokens
    return found


def event_gaps(trace: StreamTrace) -> list[float]:
    """Return the waits between events."""
    return [later - earlier for earlier, later in zip(trace.times, trace.times[1:], strict=False)]


def stream_rate(trace: StreamTrace) -> float:
    """Return the tokens per second of one request after its first event; 0 where that was its last."""
    seconds = trace.times[-1] - trace.times[0]
    return (trace.counts[-1] - trace.counts[0]) / seconds if seconds > 0 else 0.0


def most_at_once(traces: Iterable[StreamTrace]) -> int:
    """Return how many requests were between their first and their last token at one moment, at most."""
    changes = [(moment, step) for t in traces for moment, step in ((t.times[0], 1), (t.times[-1], -1))]
    # Of one moment, beginnings first: a request of a single event was there, too.
    running = most = 0
    for _, step in sorted(changes, key=lambda change: (change[0], -change[1])):
        running += step
        most = max(most, running)
    return most


def percentile(values: Sequence[float], q: float) -> float:
    """Return the q-th percentile; 0 of no values."""
    return float(np.percentile(values, q)) if len(values) else 0.0
