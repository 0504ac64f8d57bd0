"""From a step's output on the device to the result that the scheduler reads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.model_executor.report_reading import read_reports
from sglang.srt.model_executor.reporting import DeviceReport
from sglang.srt.model_executor.step import StepOutput
from sglang.srt.model_executor.step_plan import StepDrafts, StepMidInput, StepPlan, StepResult
from sglang.srt.model_executor.step_trace import StepTrace


@dataclass(frozen=True, slots=True)
class Executed:
    """A step that has been launched."""

    packed: torch.Tensor  # [R, C + 2] int64, see ``pack``; good until the next step is launched
    used_graph: bool | None = None  # None: not a decode step, or a device without graphs
    trace: StepTrace | None = None
    report: DeviceReport | None = None  # what the plan's wishes ask for


@dataclass(frozen=True, slots=True)
class DraftNodes:
    """What a masked step is about to verify, on the device."""

    tokens: torch.Tensor  # [R, N] int64
    parents: torch.Tensor | None  # [R, N] int64; None: chains


@dataclass(frozen=True, slots=True)
class BegunStep:
    """A masked step up to its choices, launched."""

    drafts: DraftNodes | None  # of a speculative one
    finish: Callable[[StepMidInput], Executed]  # launches the rest of it; called once


class StepResults(Protocol):
    """How results come to the host. Called by the executor's thread, in turn for every step."""

    def begin(self) -> None:
        """A step is about to be launched."""
        ...

    def pause(self, plan: StepPlan, drafts: DraftNodes | None) -> Callable[[], StepDrafts]:
        """The step waits for the host, which is none of its time. What gives its drafts, once."""
        ...

    def resume(self) -> None:
        """The rest of the step is about to be launched."""
        ...

    def collect(self, plan: StepPlan, executed: Executed | None) -> Callable[[], StepResult]:
        """What gives the result of the step launched since ``begin``; called once, by any thread."""
        ...


def pack(output: StepOutput) -> torch.Tensor:
    """[R, C + 2] int64: tokens, count, valid ones; so that one copy brings everything to the host."""
    return torch.cat([output.tokens, output.counts[:, None], output.num_valid[:, None]], dim=1)


def unpack(
    plan: StepPlan,
    packed_cpu: torch.Tensor | None,
    device_time_s: float,
    used_graph: bool | None = None,
    report_cpu: DeviceReport | None = None,
) -> StepResult:
    """The result of a plan. Chunks before a prompt's last one put out nothing."""
    rows = [] if packed_cpu is None else packed_cpu.tolist()
    num_decode = len(plan.decode_slots)
    chooses = [True] * num_decode + [chunk.is_last for chunk in plan.prefill]
    tokens = tuple(tuple(row[: row[-1]]) if c else () for row, c in zip(rows, chooses, strict=False))
    return StepResult(
        step_id=plan.step_id,
        tokens=tokens,
        faults=tuple(row[-1] < row[-2] for row in rows),
        device_time_s=device_time_s,
        used_graph=used_graph,
        reports=() if report_cpu is None else read_reports(plan, report_cpu, [len(row) for row in tokens]),
    )


def unpack_drafts(plan: StepPlan, drafts: DraftNodes | None) -> StepDrafts:
    """Of tensors on the host."""
    if drafts is None:
        return StepDrafts(plan.step_id, ())
    parents = None if drafts.parents is None else _rows(drafts.parents)
    return StepDrafts(plan.step_id, _rows(drafts.tokens), parents)


def _rows(values: torch.Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(row) for row in values.tolist())


class HostResults:
    """On a CPU a step has run when it has been launched."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def pause(self, plan: StepPlan, drafts: DraftNodes | None) -> Callable[[], StepDrafts]:
        self._began -= time.perf_counter()  # until ``resume``: how long it has run, negative
        found = unpack_drafts(plan, drafts)
        return lambda: found

    def resume(self) -> None:
        self._began += time.perf_counter()

    def collect(self, plan: StepPlan, executed: Executed | None) -> Callable[[], StepResult]:
        if executed is None:
            result = unpack(plan, None, time.perf_counter() - self._began)
        else:
            took = time.perf_counter() - self._began
            result = unpack(plan, executed.packed, took, executed.used_graph, executed.report)
        return lambda: result
