"""One measured run of the study, and what the file says about it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmark.spec_toggle.client import StreamTrace
from benchmark.spec_toggle.latency import latency_of, most_at_once
from benchmark.spec_toggle.rates import add_spec_counts, add_waves, spec_count, wave_rate
from benchmark.spec_toggle.records import read_lines
from benchmark.spec_toggle.runner import digest

FIXED: Final = "fixed"
"""The domain of the one prompt that a single stream repeats."""


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """One column driven once at one number of streams, with prompts of one domain."""

    column: str
    mode: str
    domain: str
    streams: int
    round: int
    position: int  # place among the columns at this point of the round (the order is shuffled)
    total_rate: float  # tok/s from sending the requests to the last token
    decode_rate: float  # tok/s while all streams decode; 0 where they never all did
    total_tokens: int
    total_seconds: float
    stream_rate: float  # tok/s of one request after its first token, the median
    ttft_p50: float  # seconds, as are the others
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    gap_p99: float
    at_once: int  # most requests between their first and last token at one moment
    spec_tokens: float  # emitted by speculative steps
    spec_steps: int  # speculative steps, one a request a step
    spec_drafts: int | None  # that they verified; None: not told
    steps_plain: int | None  # decode steps of each mode, one a request a step; None: not told
    steps_spec: int | None
    prompt_ids: tuple[str, ...]
    text_hashes: tuple[str, ...]

    @property
    def spec_share(self) -> float | None:
        """The part of the decode steps that speculated; None where the server doesn't say."""
        if self.steps_plain is None or self.steps_spec is None:
            return None
        steps = self.steps_plain + self.steps_spec
        return self.steps_spec / steps if steps else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the study a run belongs."""

    column: str
    mode: str
    domain: str
    streams: int
    round: int
    position: int


def record_of(place: Place, waves: Sequence[Sequence[StreamTrace]], prompt_ids: Sequence[str]) -> StudyRecord:
    """Sum up a run's waves."""
    rate = add_waves(wave_rate(wave) for wave in waves)
    traces = [trace for wave in waves for trace in wave]
    spec = add_spec_counts(spec_count(trace.meta) for trace in traces)
    latency = latency_of(traces)
    return StudyRecord(
        column=place.column,
        mode=place.mode,
        domain=place.domain,
        streams=place.streams,
        round=place.round,
        position=place.position,
        total_rate=rate.total_rate,
        decode_rate=rate.decode_rate,
        total_tokens=rate.total_tokens,
        total_seconds=rate.total_seconds,
        stream_rate=latency.stream_rate,
        ttft_p50=latency.ttft_p50,
        ttft_p99=latency.ttft_p99,
        itl_p50=latency.itl_p50,
        itl_p99=latency.itl_p99,
        gap_p99=latency.gap_p99,
        at_once=max(most_at_once(wave) for wave in waves),
        spec_tokens=spec.tokens,
        spec_steps=spec.steps,
        spec_drafts=_sum_of(traces, "spec_num_proposed_drafts") if spec.steps else 0,
        steps_plain=_sum_of(traces, "decode_steps_plain"),
        steps_spec=_sum_of(traces, "decode_steps_spec"),
        prompt_ids=tuple(prompt_ids),
        text_hashes=tuple(digest(trace) for trace in traces),
    )


def read_study(paths: Sequence[Path]) -> tuple[dict[str, Any], list[StudyRecord]]:
    """Read one or several files; of headers that differ, each file's is kept.

    Raises:
        ValueError: a file that is none of the study's.
    """
    headers: dict[str, Any] = {}
    records: list[StudyRecord] = []
    for path in paths:
        header, lines = read_lines(path)
        prefix = f"{path.stem}: " if len(paths) > 1 else ""
        headers |= {f"{prefix}{name}": value for name, value in header.items()}
        records += [_record(line) for line in lines]
    return headers, records


def _sum_of(traces: Sequence[StreamTrace], name: str) -> int | None:
    """Return a count of all requests; None where a request that should tell it doesn't."""
    is_spec = name.startswith("spec_")  # a request without a speculative step tells none of these
    told = [trace.meta.get(name) for trace in traces if not is_spec or trace.meta.get("spec_verify_ct")]
    return None if None in told else sum(int(count or 0) for count in told)


def _record(line: dict[str, Any]) -> StudyRecord:
    lists = {name: tuple(line[name]) for name in ("prompt_ids", "text_hashes")}
    return StudyRecord(**{**line, **lists})
