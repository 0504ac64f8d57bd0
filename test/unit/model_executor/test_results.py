"""How results come to the host, and how failures do. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.tiny_executor import tiny_executor

from sglang.srt.model_executor.device_results import DeviceResults, StreamEvent
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.reporting import DeviceReport
from sglang.srt.model_executor.results import DraftNodes, Executed, HostResults
from sglang.srt.model_executor.step_plan import (
    Logprobs,
    RowReport,
    RowWish,
    StepDrafts,
    StepKind,
    StepPlan,
    StepResult,
    Vectors,
)
from sglang.srt.model_executor.worker import Worker


def plan_of(step_id: int, num_rows: int = 1) -> StepPlan:
    slots = tuple(range(1, num_rows + 1))
    return StepPlan(step_id, StepKind.DECODE, slots, (1,) * num_rows)


IDLE = StepPlan(9, StepKind.IDLE)


class FakeEvent:
    """Time passes as events are recorded; the device is never ahead of ``gate``."""

    clock = 0.0

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.at = -1.0
        self.waited_by: list[int] = []

    def record(self) -> None:
        FakeEvent.clock += 5.0
        self.at = FakeEvent.clock

    def synchronize(self) -> None:
        assert self.gate.wait(10)
        self.waited_by.append(threading.get_ident())

    def elapsed_time(self, end_event: StreamEvent) -> float:
        assert isinstance(end_event, FakeEvent)
        return end_event.at - self.at


def device_results(gate: threading.Event) -> tuple[DeviceResults, list[FakeEvent]]:
    events: list[FakeEvent] = []

    def make() -> FakeEvent:
        events.append(FakeEvent(gate))
        return events[-1]

    return DeviceResults(8, make, pin=False), events


def packed(token: int, used_graph: bool | None = True) -> Executed:
    return Executed(torch.tensor([[token, 1, 1]]), used_graph)


def test_on_a_cpu_the_result_is_there_at_once() -> None:
    results = HostResults()
    results.begin()
    result = results.collect(plan_of(1), packed(7, None))()
    assert result.tokens == ((7,),) and result.device_time_s > 0 and result.used_graph is None


def test_what_rows_tell_may_be_written_over_too() -> None:
    gate = threading.Event()
    gate.set()
    results, _ = device_results(gate)
    plan = replace(plan_of(1, 2), wishes=(RowWish(1, True, num_top=1, token_ids=(4,), hidden_from=0),))
    values, top_ids = torch.tensor([[-1.0, -0.5, -7.0]]), torch.tensor([[9]])
    hidden = torch.tensor([[0.25, 0.5]])
    results.begin()
    report = DeviceReport(values, top_ids, 1, 1, hidden)
    arrive = results.collect(plan, Executed(torch.tensor([[5, 1, 1], [6, 1, 1]]), report=report))
    for tensor in (values, top_ids):  # hidden states have room of their own on the host, made by the step
        tensor.fill_(0)
    told = Logprobs((-1.0,), ((-0.5,),), ((9,),), ((-7.0,),))
    vectors = Vectors(array("f", [0.25, 0.5]).tobytes(), 2)
    assert arrive().reports == (RowReport(1, told, hidden=vectors),)


def test_the_output_may_be_written_over_once_it_is_collected() -> None:
    """A graph's output is the same memory every time; results are read late and in order."""
    gate = threading.Event()
    gate.set()
    results, events = device_results(gate)
    output, arrivals = torch.zeros(2, 3, dtype=torch.int64), []
    for step in range(4):
        results.begin()
        output.copy_(torch.tensor([[step, 1, 1], [step + 10, 1, 0]]))
        arrivals.append(results.collect(plan_of(step, 2), Executed(output, step % 2 == 0)))
    found = [arrive() for arrive in arrivals]
    assert [r.tokens for r in found] == [((step,), ()) for step in range(4)]
    assert all(r.faults == (False, True) and r.device_time_s == 0.005 for r in found)
    assert [r.used_graph for r in found] == [True, False, True, False]
    assert len(events) == 4 * 4


def test_a_step_that_waits_for_the_host_does_not_count_that_time() -> None:
    gate = threading.Event()
    gate.set()
    results, _ = device_results(gate)
    nodes = torch.tensor([[5, 6], [7, 8]])
    results.begin()
    drafts = results.pause(plan_of(3, 2), DraftNodes(nodes, nodes - 5))()
    assert drafts == StepDrafts(3, ((5, 6), (7, 8)), ((0, 1), (2, 3)))
    FakeEvent.clock += 1000.0
    results.resume()
    arrive = results.collect(plan_of(3, 2), Executed(torch.tensor([[1, 1, 1], [2, 1, 1]])))
    result = arrive()
    assert result.tokens == ((1,), (2,)) and result.device_time_s == 0.010  # 5 ms before, 5 ms after
    host = HostResults()
    host.begin()
    assert host.pause(plan_of(3), None)() == StepDrafts(3, ())
    time.sleep(0.2)
    host.resume()
    assert host.collect(plan_of(3), packed(7, None))().device_time_s < 0.1


def test_places_go_round() -> None:
    gate = threading.Event()
    gate.set()
    results, events = device_results(gate)
    for step in range(20):
        results.begin()
        assert results.collect(plan_of(step), packed(step))().tokens == ((step,),)
        results.begin()
        assert results.collect(IDLE, None)() == StepResult(9, (), (), 0.0)
    assert len(events) == 2 * 4


def executor_of(
    execute: Callable[[StepPlan], Executed | None], results_of: Callable[[Worker], DeviceResults]
) -> InProcessExecutor:
    real = tiny_executor()
    worker, info = real.worker, real.info
    real.shutdown()
    worker.execute = execute  # type: ignore[method-assign]
    return InProcessExecutor(lambda: (worker, info), results_of)


def test_the_executor_launches_on_while_the_caller_waits() -> None:
    gate, launched = threading.Event(), threading.Semaphore(0)
    results, events = device_results(gate)

    def execute(plan: StepPlan) -> Executed:
        launched.release()
        return packed(plan.step_id)

    executor = executor_of(execute, lambda worker: results)
    pending = [executor.launch(plan_of(step)) for step in range(3)]
    for _ in range(3):
        assert launched.acquire(timeout=10)  # none of them has come back yet
    gate.set()
    assert [p.wait().tokens for p in pending] == [((0,),), ((1,),), ((2,),)]
    assert {who for event in events for who in event.waited_by} == {threading.get_ident()}
    executor.shutdown()


def test_a_launch_that_fails_leaves_the_steps_before_it_alone() -> None:
    gate = threading.Event()
    gate.set()
    results, _ = device_results(gate)

    def execute(plan: StepPlan) -> Executed:
        if plan.step_id == 1:
            raise RuntimeError("bad launch")
        return packed(plan.step_id)

    executor = executor_of(execute, lambda worker: results)
    pending = [executor.launch(plan_of(step)) for step in range(3)]
    assert pending[0].wait().tokens == ((0,),)
    for late in (*pending[1:], executor.launch(plan_of(3))):
        with pytest.raises(RuntimeError, match="bad launch"):
            late.wait()
    executor.shutdown()


def test_an_error_that_the_device_tells_of_late_reaches_every_later_step() -> None:
    gate = threading.Event()
    results, events = device_results(gate)
    executor = executor_of(lambda plan: packed(plan.step_id), lambda worker: results)
    pending = [executor.launch(plan_of(step)) for step in range(2)]
    pending[1].arrival.result(10)  # both are launched

    def fail() -> None:
        raise RuntimeError("device-side assert")

    events[1].synchronize = fail  # type: ignore[method-assign]
    gate.set()
    for late in (*pending, executor.launch(plan_of(2))):
        with pytest.raises(RuntimeError, match="device-side assert"):
            late.wait()
    executor.shutdown()


def test_an_executor_whose_results_can_not_be_made_is_not_built() -> None:
    def refuse(worker: Worker) -> DeviceResults:
        raise MemoryError("no pinned memory")

    with pytest.raises(MemoryError, match="no pinned memory"):
        executor_of(lambda plan: None, refuse)
