"""Results of a device that computes on its own: the executor's thread never waits for it.

After a step's launches its packed output is copied to pinned memory on the same stream, so before
the next step can write over it. Whoever wants the result waits for the event behind that copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch

from sglang.srt.model_executor.results import DraftNodes, Executed, unpack, unpack_drafts
from sglang.srt.model_executor.step_plan import StepDrafts, StepPlan, StepResult


class StreamEvent(Protocol):
    """``torch.cuda.Event``, as far as it is used."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds to another event of the same kind."""
        ...


def timing_event() -> StreamEvent:
    event: StreamEvent = torch.cuda.Event(enable_timing=True)
    return event


@dataclass(frozen=True, slots=True)
class _Place:
    """Room for one result on its way to the host."""

    packed_pinned: torch.Tensor  # [values] int64
    began: StreamEvent
    ended: StreamEvent
    paused: StreamEvent
    resumed: StreamEvent


class DeviceResults:
    """Places go round: taken by ``begin``, given back when the result has been read."""

    def __init__(
        self, max_values: int, make_event: Callable[[], StreamEvent] = timing_event, pin: bool = True
    ) -> None:
        """``max_values``: numbers in the largest packed output."""
        self._max_values = max_values
        self._make_event = make_event
        self._pin = pin
        self._free: SimpleQueue[_Place] = SimpleQueue()
        for _ in range(2):  # the scheduler has two steps in flight; others may have more
            self._free.put(self._new_place())
        self._current: _Place | None = None
        self._is_split = False  # the current step has waited for the host

    def begin(self) -> None:
        self._current = self._take()
        self._current.began.record()
        self._is_split = False

    def pause(self, plan: StepPlan, drafts: DraftNodes | None) -> Callable[[], StepDrafts]:
        """Drafts come to the host where the result will."""
        place = self._current
        assert place is not None, "pause() without begin()"
        self._is_split = True
        arriving = None
        if drafts is not None:
            room = place.packed_pinned
            tokens = _arrive(room, drafts.tokens)
            parents = drafts.parents
            arriving = DraftNodes(
                tokens, None if parents is None else _arrive(room[tokens.numel() :], parents)
            )
        place.paused.record()

        def wait() -> StepDrafts:
            place.paused.synchronize()
            return unpack_drafts(plan, arriving)

        return wait

    def resume(self) -> None:
        assert self._current is not None
        self._current.resumed.record()

    def collect(self, plan: StepPlan, executed: Executed | None) -> Callable[[], StepResult]:
        place, self._current = self._current, None
        is_split = self._is_split
        assert place is not None, "collect() without begin()"
        if executed is None:
            self._free.put(place)
            return lambda: unpack(plan, None, 0.0)
        packed = executed.packed
        arriving = _arrive(place.packed_pinned, packed)
        report = None if executed.report is None else executed.report.to_host(self._pin)
        place.ended.record()

        waits = iter((True,))

        def wait() -> StepResult:
            assert next(waits, False), "a step is waited for once: its place may be another one's by now"
            place.ended.synchronize()
            milliseconds = place.began.elapsed_time(place.ended)
            if is_split:
                milliseconds -= place.paused.elapsed_time(place.resumed)
            seconds = milliseconds / 1000
            result = unpack(plan, arriving, seconds, executed.used_graph, report)
            self._free.put(place)
            return result

        return wait

    def _take(self) -> _Place:
        try:
            return self._free.get_nowait()
        except Empty:
            return self._new_place()

    def _new_place(self) -> _Place:
        packed = torch.empty(self._max_values, dtype=torch.int64, pin_memory=self._pin)
        return _Place(packed, *(self._make_event() for _ in range(4)))


def _arrive(room: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The beginning of ``room`` in the shape of ``values``, which are on their way there."""
    arriving = room[: values.numel()].view(values.shape)
    arriving.copy_(values, non_blocking=True)
    return arriving
