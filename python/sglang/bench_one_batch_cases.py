"""A static batch driven by hand-made plans, and what its steps took; for ``bench_*`` and benchmarks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import cycle, pairwise

from sglang.srt.model_executor.executor import Executor, PendingStep
from sglang.srt.model_executor.step_plan import (
    PageWrite,
    PrefillChunk,
    SlotAdmission,
    SlotSampling,
    StepKind,
    StepPlan,
    StepResult,
)

GREEDY = SlotSampling(temperature=0.0)


class FaultyStep(RuntimeError):
    """The model's logits were not finite: times mean nothing then, and rows would never finish."""


@dataclass
class Row:
    """One request: slot ``slot`` owns the pages that follow each other from ``first_page``."""

    slot: int
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    is_admitted: bool = False
    sampling: SlotSampling = GREEDY  # as of its admission
    steps_ahead: int = 0  # launched, result not known
    most_ahead: int = 0  # tokens these may put out


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step. Moments are those of ``time.perf_counter``."""

    draft_len: int
    slots: tuple[int, ...]
    counts: tuple[int, ...]  # tokens put out, by slot
    is_full: bool  # every row of the batch ran, and none was finished before
    launched_s: float
    done_s: float  # its result was on the host
    device_s: float
    used_graph: bool | None = None  # None: on a device without graphs

    @property
    def num_tokens(self) -> int:
        return sum(self.counts)


@dataclass(frozen=True, slots=True)
class PrefillTime:
    wall_s: float  # until every row has its first token
    device_s: float


@dataclass(frozen=True, slots=True)
class _Launched:
    draft_len: int
    rows: tuple[Row, ...]
    pending: PendingStep
    launched_s: float


class OneBatch:
    """Rows in slots 1, 2, …, each with pages for all it will ever hold (``places`` tokens).

    Row i of every batch with the same ``places`` has the same pages.
    """

    def __init__(
        self,
        executor: Executor,
        prompts: Sequence[Sequence[int]],
        places: int,
        prefill_tokens: int | None = None,  # of one step; None: what the device does at once
    ) -> None:
        self._executor = executor
        self.rows = [Row(slot, list(prompt)) for slot, prompt in enumerate(prompts, start=1)]
        self._pages = -(-places // executor.info.page_size)
        self._prefill_tokens = prefill_tokens or executor.info.default_chunk
        self._step_id = 0

    def outputs(self) -> list[list[int]]:
        return [row.output for row in self.rows]

    def prefill(self, cut_len: int = 0, cached: bool = False) -> PrefillTime:
        """All prompts, in as few steps as hold them.

        ``cut_len``: the first ids of each prompt in steps of their own. ``cached``: the pages hold
        these prompts already (an earlier batch of the same prompts and places left them), so only the
        last id of each is run.
        """
        plans = list(self._prefill_plans(cut_len, cached))
        began = time.perf_counter()
        pending = [(self._executor.launch(plan), rows) for plan, rows in plans]
        device_s = 0.0
        for step, rows in pending:
            result = step.wait()
            device_s += result.device_time_s
            _give(result, rows)
        return PrefillTime(time.perf_counter() - began, device_s)

    def decode(self, draft_len: int, output_len: int) -> tuple[float, int]:
        """One step of the rows that lack tokens; returns seconds and tokens put out."""
        launched = self.launch(draft_len, output_len)
        assert launched is not None, "no row lacks tokens"
        step = self.wait(launched)
        return step.done_s - step.launched_s, step.num_tokens

    def launch(self, draft_len: int, output_len: int) -> _Launched | None:
        """A step of the rows that the steps ahead do not surely finish; None if there are none."""
        rows = tuple(row for row in self.rows if len(row.output) + row.steps_ahead < output_len)
        if not rows:
            return None
        bounds = tuple(len(row.prompt) + len(row.output) - 1 + row.most_ahead for row in rows)
        slots = tuple(row.slot for row in rows)
        plan = StepPlan(self._next_id(), StepKind.DECODE, slots, bounds, draft_len)
        for row in rows:
            row.steps_ahead += 1
            row.most_ahead += draft_len + 1
        moment = time.perf_counter()
        return _Launched(draft_len, rows, self._executor.launch(plan), moment)

    def wait(self, launched: _Launched, output_len: int | None = None) -> Step:
        """``output_len``: a row that has so many tokens is finished."""
        result = launched.pending.wait()
        done = time.perf_counter()
        rows = launched.rows
        nobody_finished = output_len is None or all(len(row.output) < output_len for row in self.rows)
        for row in rows:
            row.steps_ahead -= 1
            row.most_ahead -= launched.draft_len + 1
        _give(result, rows)
        return Step(
            draft_len=launched.draft_len,
            slots=tuple(row.slot for row in rows),
            counts=tuple(len(tokens) for tokens in result.tokens),
            is_full=len(rows) == len(self.rows) and nobody_finished,
            launched_s=launched.launched_s,
            done_s=done,
            device_s=result.device_time_s,
            used_graph=result.used_graph,
        )

    def decode_all(
        self,
        draft_lens: Sequence[int],
        output_len: int,
        overlap: bool = True,
        max_steps: int | None = None,
        on_step: Callable[[Step], None] = lambda step: None,
    ) -> list[Step]:
        """Steps until every row has ``output_len`` tokens (or ``max_steps``), the draft lengths in turn.

        With ``overlap`` a step is launched before the one ahead of it is waited for, as the scheduler
        does it: the device never waits for the host. No step is in flight afterwards.
        """
        steps: list[Step] = []
        ahead: _Launched | None = None
        for index, draft_len in enumerate(cycle(draft_lens)):
            more = max_steps is None or index < max_steps
            launched = self.launch(draft_len, output_len) if more else None
            if not overlap:
                ahead, launched = launched, None
            if ahead is not None:
                steps.append(self.wait(ahead, output_len))
                on_step(steps[-1])
            if ahead is None and launched is None:
                return steps
            ahead = launched
        return steps

    def _prefill_plans(self, cut_len: int, cached: bool) -> Iterator[tuple[StepPlan, list[Row]]]:
        starts = [len(row.prompt) - 1 if cached else 0 for row in self.rows]
        if cut_len:
            yield from self._packed(list(zip(self.rows, starts, [cut_len] * len(starts), strict=True)))
            starts = [cut_len] * len(starts)
        yield from self._packed([(r, s, len(r.prompt)) for r, s in zip(self.rows, starts, strict=True)])

    def _packed(self, spans: Sequence[tuple[Row, int, int]]) -> Iterator[tuple[StepPlan, list[Row]]]:
        """Steps of at most ``prefill_tokens`` that cover the spans in order."""
        chunks: list[tuple[Row, int, int]] = []
        room = self._prefill_tokens
        for row, start, end in spans:
            while start < end:
                taken = min(room, end - start)
                chunks.append((row, start, start + taken))
                start, room = start + taken, room - taken
                if room == 0:
                    yield self._prefill_plan(chunks), [row for row, _, _ in chunks]
                    chunks, room = [], self._prefill_tokens
        if chunks:
            yield self._prefill_plan(chunks), [row for row, _, _ in chunks]

    def _prefill_plan(self, spans: Sequence[tuple[Row, int, int]]) -> StepPlan:
        chunks, admissions, writes = [], [], []
        for row, start, end in spans:
            next_id = None if end == len(row.prompt) else row.prompt[end]
            chunks.append(PrefillChunk(row.slot, start, tuple(row.prompt[start:end]), next_id))
            if row.is_admitted:
                continue
            row.is_admitted = True
            known = tuple(row.prompt[: start + 1])
            admissions.append(SlotAdmission(row.slot, len(row.prompt), start, row.sampling, known_ids=known))
            writes.append(PageWrite(row.slot, 0, self._pages_of(row)))
        return StepPlan(
            self._next_id(),
            StepKind.PREFILL,
            prefill=tuple(chunks),
            admissions=tuple(admissions),
            page_writes=tuple(writes),
        )

    def _pages_of(self, row: Row) -> tuple[int, ...]:
        first = 1 + (row.slot - 1) * self._pages
        return tuple(range(first, first + self._pages))

    def _next_id(self) -> int:
        self._step_id += 1
        return self._step_id


def places_needed(executor: Executor, input_len: int, output_len: int) -> int:
    """A row may be stepped once more than its last token needs, with all its drafts."""
    spec = executor.info.spec
    return input_len + output_len + (spec.num_steps + spec.num_draft_tokens + 1 if spec else 1)


@dataclass(frozen=True, slots=True)
class ModeTimes:
    """The full steps of one draft length."""

    num_steps: int
    median_device_s: float
    tokens_per_row: float  # of a step


@dataclass(frozen=True, slots=True)
class DecodeTimes:
    """Of full steps alone: from the first one's end to that of the one that finishes the first row."""

    num_steps: int
    wall_step_s: float
    tokens_per_s: float
    tokens_per_row: float  # of a step
    median_latency_s: float  # from one step's end to the next one's
    median_device_s: float
    eager_steps: int  # that no CUDA graph covered; 0 on a device without graphs
    modes: dict[int, ModeTimes]  # by draft length


def decode_times(steps: Sequence[Step]) -> DecodeTimes | None:
    """None where there was no full step."""
    full = [step for step in steps if step.is_full]
    if not full:
        return None
    # The first step's start is not that of a pipeline that runs; without a second one it has to do.
    timed = full[1:] or full
    began = full[0].done_s if len(full) > 1 else full[0].launched_s
    seconds = timed[-1].done_s - began
    ends = [began, *(step.done_s for step in timed)]
    by_mode: dict[int, list[Step]] = {}
    for step in full:
        by_mode.setdefault(step.draft_len, []).append(step)
    return DecodeTimes(
        num_steps=len(timed),
        wall_step_s=seconds / len(timed),
        tokens_per_s=sum(step.num_tokens for step in timed) / seconds,
        tokens_per_row=_tokens_per_row(full),
        median_latency_s=statistics.median(b - a for a, b in pairwise(ends)),
        median_device_s=statistics.median(step.device_s for step in full),
        eager_steps=sum(step.used_graph is False for step in full),
        modes={k: _mode_times(v) for k, v in sorted(by_mode.items())},
    )


def _mode_times(steps: Sequence[Step]) -> ModeTimes:
    return ModeTimes(len(steps), statistics.median(s.device_s for s in steps), _tokens_per_row(steps))


def _tokens_per_row(steps: Sequence[Step]) -> float:
    return sum(step.num_tokens for step in steps) / sum(len(step.slots) for step in steps)


def _give(result: StepResult, rows: Sequence[Row]) -> None:
    if any(result.faults):
        raise FaultyStep(f"step {result.step_id}: logits that are not finite")
    for row, tokens in zip(rows, result.tokens, strict=True):
        row.output += tokens
