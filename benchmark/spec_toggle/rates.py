"""From the traces of streams that ran together to tokens per second and accept length. Pure functions.

The decode rate is taken over the span in which *all* streams decode: from the moment every request has its
first token until the first one finishes. Prefill, ramp and tail are outside it. Tokens that arrive in a
bunch belong to the time since the bunch before, so a stream's count is read off a straight line between
its events; otherwise a step whose outputs arrive a millisecond after the span's end would be lost whole.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.spec_toggle.client import StreamTrace


@dataclass(frozen=True, slots=True)
class WaveRate:
    """What one wave of simultaneous streams (or several waves added up) produced."""

    decode_tokens: float
    decode_seconds: float
    total_tokens: int
    total_seconds: float

    @property
    def decode_rate(self) -> float:
        """Tokens per second while all streams decode; 0 where there was no such span."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def total_rate(self) -> float:
        """Tokens per second from sending the requests to the last token, prefill included."""
        return self.total_tokens / self.total_seconds if self.total_seconds > 0 else 0.0


def wave_rate(traces: Sequence[StreamTrace]) -> WaveRate:
    """Measure one wave: streams that were started together."""
    begin = max(trace.times[0] for trace in traces)
    end = min(trace.times[-1] for trace in traces)
    tokens = 0.0
    if end > begin:
        tokens = sum(tokens_at(trace, end) - tokens_at(trace, begin) for trace in traces)
    return WaveRate(
        decode_tokens=tokens,
        decode_seconds=max(0.0, end - begin),
        total_tokens=sum(trace.counts[-1] for trace in traces),
        total_seconds=max(trace.times[-1] for trace in traces) - min(trace.started for trace in traces),
    )


def add_waves(waves: Iterable[WaveRate]) -> WaveRate:
    """Add up waves that ran one after the other."""
    waves = list(waves)
    return WaveRate(
        decode_tokens=sum(wave.decode_tokens for wave in waves),
        decode_seconds=sum(wave.decode_seconds for wave in waves),
        total_tokens=sum(wave.total_tokens for wave in waves),
        total_seconds=sum(wave.total_seconds for wave in waves),
    )


def tokens_at(trace: StreamTrace, moment: float) -> float:
    """Return how many tokens the stream had at ``moment``, on straight lines between its events."""
    after = bisect_right(trace.times, moment)
    if after == 0:
        return 0.0
    if after == len(trace.times):
        return float(trace.counts[-1])
    begin, end = trace.times[after - 1], trace.times[after]
    low, high = trace.counts[after - 1], trace.counts[after]
    return low + (high - low) * (moment - begin) / (end - begin)


@dataclass(frozen=True, slots=True)
class SpecCount:
    """Tokens emitted by speculative steps, and the number of those steps (one a request a step)."""

    tokens: float
    steps: int

    @property
    def accept_length(self) -> float | None:
        """Mean tokens of a speculative step; None where there was none."""
        return self.tokens / self.steps if self.steps else None


def spec_count(meta: dict[str, Any]) -> SpecCount:
    """Read a finished request's speculative tokens and steps; zeros where it was decoded plainly."""
    steps = int(meta.get("spec_verify_ct") or 0)
    if not steps:
        return SpecCount(0.0, 0)
    return SpecCount(float(meta["spec_accept_length"]) * steps, steps)


def add_spec_counts(counts: Iterable[SpecCount]) -> SpecCount:
    """Add up the counts of several requests."""
    counts = list(counts)
    return SpecCount(sum(count.tokens for count in counts), sum(count.steps for count in counts))
