"""Kinds of fault that others had, where no other test is about just that: docs/known_faults.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers.grammar_world import byte_vocabulary
from helpers.scheduler_harness import SchedulerHarness
from helpers.tiny_executor import tiny_executor
from helpers.toggle_schedule import Arrival, Schedule, ScheduleRun

from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import Masks
from sglang.srt.managers.grammars import BROKEN
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.toggle import Decision, Policy, Reason, ToggleInput

CHAIN, TREE = SpecShape(3, 1, 4), SpecShape(2, 4, 16)


class FragileMatcher:
    """Of a grammar that allows everything. Its library raises after so many calls, of one kind."""

    is_terminated = False

    def __init__(self, kind: str, calls: int) -> None:
        self._kind, self._left = kind, calls

    def _call(self, kind: str) -> None:
        self._left -= kind == self._kind
        if self._left < 0:
            raise TypeError("argument of type 'NoneType' is not iterable")

    def accept(self, token: int) -> bool:
        self._call("accept")
        return True

    def rollback(self, count: int) -> None:
        self._call("rollback")

    def fill(self, masks: Masks, row: int) -> None:
        self._call("fill")


class FragileBackend:
    def __init__(self, kind: str, calls: int) -> None:
        self._make: Callable[[], FragileMatcher] = lambda: FragileMatcher(kind, calls)

    def compile(self, spec: Any) -> Any:
        return self

    def matcher(self) -> FragileMatcher:
        return self._make()

    num_bytes = 1


@pytest.mark.parametrize("kind, calls", [("fill", 0), ("fill", 7), ("accept", 7), ("rollback", 2)])
def test_a_grammar_library_that_raises_ends_its_request_alone(kind: str, calls: int) -> None:
    params = {"temperature": 0.0, "max_new_tokens": 24, "sampling_seed": 1, "ignore_eos": True}
    fragile = GenerateRequest("fragile", [5, 6, 7], SamplingParams(regex="x", **params), False, 0.0)
    fine = GenerateRequest("fine", [9, 8], SamplingParams(**params), False, 0.0)
    grammars = GrammarCompiler(lambda: (FragileBackend(kind, calls), byte_vocabulary()))
    executor = tiny_executor((3, 1, 4))
    arrivals = (Arrival(0, fragile, None), Arrival(0, fine, None))
    config = SchedulerConfig(max_running_requests=4)
    schedule = Schedule(0, arrivals, config, 100, use_cache=True, changes=(), mode_seed=0)
    answers = ScheduleRun(executor, schedule, grammars).run().answers
    executor.shutdown()
    assert answers["fragile"].finish is not None and answers["fine"].finish is not None
    assert (answers["fragile"].finish.status_code, answers["fragile"].finish.message) == (500, BROKEN)
    assert answers["fine"].finish.type == "length" and len(answers["fine"].ids) == 24


def changing_at(step: int, first: bool) -> Policy:
    """One change of mode, from or to speculation."""
    decided = iter(range(10**6))

    def decide(state: ToggleInput) -> Decision:
        speculates = (next(decided) < step) == first
        return Decision(state.num_steps if speculates and state.spec_fits else 0, Reason.MANUAL)

    return decide


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("first", [False, True], ids=["on", "off"])
def test_an_abort_around_the_step_of_a_switch(spec: SpecShape, first: bool) -> None:
    """With the result of the old mode in flight, before it, and after it."""
    for when in range(2, 9):
        harness = SchedulerHarness(spec=spec, policy=changing_at(3, first), page_size=2)
        victim = harness.send([1, 2, 3], max_new_tokens=40)
        harness.send([4, 5], max_new_tokens=30)
        for _ in range(when):
            harness.step()
        harness.abort(victim)
        harness.send([1, 2, 3], max_new_tokens=12)  # finds what the victim left
        harness.run()
        harness.check_end()
        assert {bool(plan.draft_len) for plan in harness.executor.plans if plan.decode_slots} == {True, False}


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_requests_that_began_in_different_modes_share_a_batch(spec: SpecShape) -> None:
    for change in range(1, 6):
        harness = SchedulerHarness(spec=spec, policy=changing_at(change, False), page_size=2, num_pages=30)
        for start in range(4):
            harness.send([start, 7], max_new_tokens=16)
            harness.step()
        harness.run()
        harness.check_end()


def test_plain_steps_of_a_server_with_a_drafter_draft_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = tiny_executor((3, 1, 4))
    drafter, calls = executor.worker.drafter, []
    assert drafter is not None
    draft = drafter.draft

    def counting(*given: Any) -> Any:
        calls.append(given)
        return draft(*given)

    monkeypatch.setattr(drafter, "draft", counting)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, sampling_seed=1, ignore_eos=True)
    message = GenerateRequest("r", [5, 6, 7], params, False, 0.0)
    config = SchedulerConfig(max_running_requests=2, speculative_disable_bs_threshold=0)
    changes: tuple[dict[str, Any], ...] = ({"speculative_disable_bs_threshold": 0},)
    for seen, schedule_changes in ((0, changes), (1, ({"speculative_disable_bs_threshold": None},))):
        schedule = Schedule(
            0, (Arrival(0, message, None),), config, 100, False, changes=schedule_changes, mode_seed=0
        )
        ScheduleRun(executor, schedule).run()
        assert bool(calls) == bool(seen)
    executor.shutdown()
