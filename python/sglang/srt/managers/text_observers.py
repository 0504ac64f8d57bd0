"""Who hears of requests beside the metrics: logs, files, traces, and what is kept for a crash dump."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec

from sglang.srt.managers.io_struct import TextOutput
from sglang.srt.managers.text_request import Sample

HEALTH_RID: Final = "HEALTH_CHECK"  # how the ids of the server's own probes begin; nobody is told of them


class TextObserver(Protocol):
    def received(self, sample: Sample) -> None: ...

    def output(self, sample: Sample, output: TextOutput, now: float) -> None:
        """News of a sample, before they are added to it."""
        ...

    def ended(self, sample: Sample) -> None:
        """It is complete: its answer, its failure or the server's."""
        ...

    def batch_ended(self) -> None:
        """All outputs of a message from the detokenizer have been given to ``output``."""
        ...


class Observers:
    """All of them, as one."""

    def __init__(self, observers: Sequence[TextObserver] = ()) -> None:
        self._observers = tuple(observers)
        # There is an output for every token: those that don't look at it are not called.
        self._hearers = tuple(one for one in observers if not isinstance(one, EndsOnly))

    def received(self, sample: Sample) -> None:
        if self._observers and not sample.rid.startswith(HEALTH_RID):
            for observer in self._observers:
                observer.received(sample)

    def output(self, sample: Sample, output: TextOutput, now: float) -> None:
        for observer in self._hearers:
            observer.output(sample, output, now)

    def batch_ended(self) -> None:
        for observer in self._hearers:
            observer.batch_ended()

    def ended(self, sample: Sample) -> None:
        if self._observers and not sample.rid.startswith(HEALTH_RID):
            for observer in self._observers:
                observer.ended(sample)


class EndsOnly:
    """For observers that look at the two ends of a request."""

    def received(self, sample: Sample) -> None:
        return None

    def output(self, sample: Sample, output: TextOutput, now: float) -> None:
        return None

    def batch_ended(self) -> None:
        return None


def times_of(sample: Sample) -> dict[str, float]:
    """Seconds, as far as they are known: waiting, to the first token, from there to the end, all of it."""
    stats, end = sample.stats, sample.finished_ts
    points: list[tuple[str, float | None, float | None]] = [
        ("queue_time", sample.created_ts, stats.admitted_ts)
    ]
    points += [("time_to_first_token", sample.created_ts, stats.first_token_ts)]
    points += [("decode_time", stats.first_token_ts, end), ("e2e_latency", sample.created_ts, end)]
    return {
        name: round(max(0.0, until - since), 6)
        for name, since, until in points
        if since is not None and until is not None
    }


def parameters_of(sample: Sample) -> dict[str, Any]:
    """What the client asked for, what it left at its default left out."""
    sampling = sample.request.sampling
    values: dict[str, Any] = msgspec.to_builtins(sampling)
    defaults: dict[str, Any] = msgspec.to_builtins(type(sampling)())
    return {name: value for name, value in values.items() if value != defaults[name]}


def outcome_of(sample: Sample) -> dict[str, Any]:
    """Figures of a request that has ended; nothing of its texts."""
    stats = msgspec.structs.asdict(sample.stats)
    return {
        "rid": sample.rid,
        "stream": sample.request.stream,
        "finish_reason": None if sample.finish is None else msgspec.to_builtins(sample.finish),
        **times_of(sample),
        **stats,
    }
