"""Segments of one running batch, its modes in turn: what `auto_study.py` measures at a point.

A point is an acceptance, a context and a number of streams. With simulated acceptance one batch serves all
its segments (switching costs nothing); with a real drafter each segment begins with the same prompts anew,
so that every mode decodes the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from benchmark.h200.executors import Records
from benchmark.h200.in_process import InProcess, Mode, StepRecord, fixed_modes
from sglang.srt.speculative.simulate import SimulatedAcceptance

FIRST = "first"  # the segment of auto just after the acceptance has changed
GROWTH = 1 / 16  # of the context, and the batch is renewed: KV is half of a step's time where rows are many
SETTLING = "settling"  # further ones, until what was seen before has lost its weight
AUTO = Mode("auto", "auto")


@dataclass(frozen=True, slots=True)
class Sizes:
    streams: tuple[int, ...]
    contexts: tuple[int, ...]  # ignored with real prompts
    rounds: int
    segment_s: float  # a segment ends after so long and ``min_steps``, at ``max_steps`` at the latest
    min_steps: int
    max_steps: int
    first_steps: int  # of auto after a change
    first_s: float  # but no longer than this
    settling: int  # more segments of as many steps before the rounds begin
    settling_s: float  # but no longer than this, all together


@dataclass(frozen=True, slots=True)
class Point:
    acceptance: float | None  # simulated tokens of a step with all drafts; None: the drafter's own
    context: int  # 0: the prompts' own
    streams: int


@dataclass(frozen=True, slots=True)
class Limits:
    seconds: float
    min_steps: int
    max_steps: int


Prompts = Callable[[Point], list[list[int]]]


class PointRunner:
    def __init__(
        self,
        engine: InProcess,
        sizes: Sizes,
        threshold: int,
        prompts: Prompts,
        simulated: SimulatedAcceptance | None,
        out: Records,
    ) -> None:
        spec = engine.executor.info.spec
        assert spec is not None
        self._engine = engine
        self._sizes = sizes
        self._modes = [*fixed_modes(spec.num_steps), Mode("threshold", threshold), AUTO]
        self._prompts = prompts
        self._simulated = simulated
        self._out = out
        # Places a row may need in one segment.
        self._room = (spec.num_steps + 1) * (max(sizes.max_steps, sizes.first_steps) + 2)

    @property
    def makes_up(self) -> bool:
        """Whether acceptance and prompts are made up."""
        return self._simulated is not None

    def fits(self, point: Point) -> bool:
        info = self._engine.executor.info
        return point.streams * (point.context + self._room) <= info.num_pages * info.page_size

    def warm_up(self, points: Sequence[Point]) -> None:
        """Some kernels are compiled when they first run."""
        for point in points:
            self._begin(point)
            for mode in self._modes:
                self._engine.set_mode(mode)
                for _ in range(3):
                    self._engine.step()
            self._engine.end()

    def run(self, point: Point) -> None:
        if not self.fits(point):
            self._out.add("left_out", **_labels(point), reason="the KV pool is too small")
            return
        if self._simulated is not None:
            assert point.acceptance is not None
            self._simulated.set_length(point.acceptance)
            self._out.add("survival", acceptance=point.acceptance, by_depth=list(self._simulated.survival))
        sizes, first = self._sizes, len(self._engine.records)
        self._begin(point)
        changed = Limits(sizes.first_s, sizes.min_steps, sizes.first_steps)
        self._segment(point, AUTO, FIRST, changed)
        self._settle(point, changed)
        limits = Limits(sizes.segment_s, sizes.min_steps, sizes.max_steps)
        for number in range(sizes.rounds):
            for mode in turns(self._modes, number):
                self._renew(point)
                self._segment(point, mode, str(number), limits)
        self._engine.end()
        for line in segments(self._engine.records[first:], point.streams):
            self._out.add("segment", **_labels(point), **line)
        del self._engine.records[first:]

    def _settle(self, point: Point, limits: Limits) -> None:
        began = self._engine.clock.now()
        for _ in range(self._sizes.settling):
            left = self._sizes.settling_s - (self._engine.clock.now() - began)
            if left <= 0:
                return
            self._renew(point)
            self._segment(point, AUTO, SETTLING, replace(limits, seconds=min(left, limits.seconds)))

    def _begin(self, point: Point) -> None:
        # Never reached: a segment ends before.
        longest = self._engine.executor.info.context_len
        self._engine.begin(self._prompts(point), longest, skip_prefill=self.makes_up)

    def _renew(self, point: Point) -> None:
        """The same prompts again: where the text matters, rows have grown, or the places run out."""
        scheduler = self._engine.scheduler
        free = scheduler.pages.num_free * self._engine.executor.info.page_size
        longest = max(request.kv_len_bound for request in scheduler.table.running())
        grown = longest - point.context > point.context * GROWTH
        full = longest + self._room > self._engine.executor.info.context_len
        if not self.makes_up or grown or full or free < point.streams * self._room:
            self._engine.end()
            self._begin(point)

    def _segment(self, point: Point, mode: Mode, number: str, limits: Limits) -> None:
        engine = self._engine
        engine.set_mode(mode)
        engine.executor.label = f"{mode.name}/{number}"
        began = engine.clock.now()
        for step in range(1, limits.max_steps + 1):
            engine.step()
            if step >= limits.min_steps and engine.clock.now() - began >= limits.seconds:
                break
        engine.executor.label = ""


def turns(modes: Sequence[Mode], number: int) -> list[Mode]:
    """Another first one in every round, and to and fro, so that no mode always follows the same one."""
    start = number % len(modes)
    order = [*modes[start:], *modes[:start]]
    return order if number % 2 == 0 else order[::-1]


def segments(records: Sequence[StepRecord], num_rows: int) -> Iterator[dict[str, object]]:
    """One line a segment: the decode steps of all rows. JSON's keys are strings."""
    by_label: dict[str, list[StepRecord]] = {}
    for record in records:
        if "/" in record.label and record.num_rows == num_rows:
            by_label.setdefault(record.label, []).append(record)
    for label, steps in by_label.items():
        mode, number = label.split("/")
        by_len: dict[int, list[StepRecord]] = {}
        for step in steps:
            by_len.setdefault(step.draft_len, []).append(step)
        yield {
            "mode": mode,
            "round": number,
            "seconds": sum(step.gap_s for step in steps),
            "device_s": sum(step.device_s for step in steps),
            "tokens": sum(step.num_tokens for step in steps),
            "kv_tokens": steps[len(steps) // 2].kv_tokens,
            "eager_steps": sum(step.used_graph is False for step in steps),
            "steps": {str(k): len(of) for k, of in sorted(by_len.items())},
            "accepted": {str(k): _sums(of) for k, of in sorted(by_len.items())},
        }


def _sums(steps: Sequence[StepRecord]) -> list[int]:
    return [sum(column) for column in zip(*(step.accepted for step in steps), strict=True)]


def _labels(point: Point) -> dict[str, object]:
    return {"acceptance": point.acceptance, "context": point.context, "streams": point.streams}


def made_up_prompts(vocab_size: int) -> Prompts:
    """Ids that mean nothing; their KV is never computed."""

    def prompts(point: Point) -> list[list[int]]:
        ids = [place % vocab_size for place in range(point.context)]
        return [ids] * point.streams

    return prompts


def real_prompts(pool: Sequence[Sequence[int]]) -> Prompts:
    def prompts(point: Point) -> list[list[int]]:
        times = math.ceil(point.streams / len(pool))
        return [list(ids) for ids in [*pool] * times][: point.streams]

    return prompts
