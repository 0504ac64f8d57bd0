"""``auto`` and schedules in the scheduler: what is chosen, told, counted, and changed while it runs.

Run alone: ``pytest THIS_FILE``.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from helpers.scheduler_harness import SchedulerHarness
from prometheus_client import CollectorRegistry

from sglang.srt.managers.prometheus_sink import PrometheusSink, SinkLabels
from sglang.srt.model_executor.step_plan import GraphSet, SpecShape, StepCost
from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.controller import AutoController, CommittedStep
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.toggle import Decision

CHAIN = SpecShape(3)
THRESHOLD, SCHEDULE = "speculative_disable_bs_threshold", "speculative_bs_schedule"


def controller(step_s: dict[int, float], row_s: dict[int, float] | None = None) -> AutoController:
    """Costs by draft length: of a step, and of each of its rows. The fake executor's steps take 1 ms."""
    per_row = row_s or {}
    costs = [
        StepCost(k, rows, fixed + per_row.get(k, 0.0) * rows, 0.0)
        for k, fixed in step_s.items()
        for rows in (1, 2, 4, 8)
    ]
    return AutoController(CostTable.from_costs(costs, padded=False), CHAIN.num_steps)


class ToldController(AutoController):
    """Keeps what it was asked and told."""

    def __init__(self) -> None:
        costs = [StepCost(k, rows, 0.001, 0.0) for k in range(4) for rows in (1, 8)]
        super().__init__(CostTable.from_costs(costs, padded=False), CHAIN.num_steps)
        self.asked: list[tuple[AutoInput, Decision]] = []
        self.told: list[CommittedStep] = []

    def decide(self, state: AutoInput) -> Decision:
        self.asked.append((state, super().decide(state)))
        return self.asked[-1][1]

    def observe(self, step: CommittedStep) -> None:
        self.told.append(step)
        super().observe(step)


def auto_harness(auto: AutoController, **options: Any) -> SchedulerHarness:
    return SchedulerHarness(**{"spec": CHAIN, "auto": auto, THRESHOLD: "auto", **options})


def lens(harness: SchedulerHarness) -> Counter[int]:
    return Counter(plan.draft_len for plan in harness.executor.plans if plan.decode_slots)


@pytest.mark.parametrize("best", [0, 1, 2, 3])
def test_the_length_with_the_most_tokens_per_second_is_run(best: int) -> None:
    costs = {k: 0.001 if k == best else 0.1 for k in range(4)}
    harness = auto_harness(controller(costs))
    for start in range(5):
        harness.send([start, 1, 2], max_new_tokens=20)
    harness.run()
    harness.check_end()
    assert lens(harness).most_common(1)[0][0] == best
    decisions = harness.state()["spec_decisions"]
    assert max(decisions, key=decisions.get) == f"{best}:cost"


def test_many_rows_get_fewer_drafts() -> None:
    auto = controller({0: 0.001, 1: 0.001, 2: 0.001, 3: 0.001}, {0: 0.0, 1: 0.001, 2: 0.002, 3: 0.003})
    harness = auto_harness(auto, num_slots=8, lazy=False)
    by_rows: dict[int, set[int]] = {}
    for count in (1, 8):
        for start in range(count):
            harness.send([start, 1, 2], max_new_tokens=6)
        first = len(harness.executor.plans)
        harness.run()
        by_rows[count] = {p.draft_len for p in harness.executor.plans[first:] if len(p.decode_slots) == count}
    assert 0 in by_rows[8] and by_rows[1] == {0}, "a row more costs as much as a step"
    cheap = auto_harness(controller({0: 0.004, 1: 0.0041, 2: 0.0042, 3: 0.0043}))
    cheap.send([1, 2, 3], max_new_tokens=20)
    cheap.run()
    assert lens(cheap)[3] > 0


def test_what_was_run_is_told_with_what_it_was_decided_by() -> None:
    auto = ToldController()
    harness = auto_harness(auto)
    harness.executor.accept_counts.extend([2, 1] * 100)
    for temperature in (0.0, 1.0):
        harness.send([1, 2, 3], max_new_tokens=30, temperature=temperature, speculative_draft_len=None)
    harness.run()
    assert len(auto.told) == len(auto.asked) > 4
    for (state, decision), step in zip(auto.asked, auto.told, strict=True):
        assert step.decision == decision
        assert (step.num_rows, step.kv_tokens) == (state.num_decoding, state.kv_tokens)
        assert step.device_time_s == 0.001
        assert state.prepared_lens == state.fitting_lens == (1, 2, 3) and state.num_steps == 3
    state, decision = next(entry for entry in auto.asked if entry[0].num_decoding == 2)
    assert dict(state.class_counts) == {"greedy": 1, "sampled": 1}
    step = next(step for step in auto.told if len(step.tallies) == 2)
    k = step.decision.draft_len
    told = {tally.name: (tally.proposed_by_depth, tally.correct_by_depth) for tally in step.tallies}
    assert told == {
        "greedy": ((1,) * k, tuple(int(depth < 2) for depth in range(k))),
        "sampled": ((1,) * k, tuple(int(depth < 1) for depth in range(k))),
    }
    figures = harness.state()["spec_auto"]["acceptance"]
    assert set(figures) == {"greedy", "sampled"}
    assert figures["greedy"]["by_depth"][0] > figures["sampled"]["by_depth"][1]


def test_kv_tokens_are_those_of_the_rows() -> None:
    auto = ToldController()
    harness = auto_harness(auto, disable_overlap=True)
    harness.executor.accept_counts.extend([0] * 100)
    harness.send(list(range(10)), max_new_tokens=3)
    harness.run()
    assert [state.kv_tokens for state, _ in auto.asked] == [10, 11]


def test_capped_requests_are_a_class_of_their_own_and_never_accept_what_they_may_not() -> None:
    auto = ToldController()
    harness = auto_harness(auto)
    harness.executor.accept_counts.extend([3] * 300)
    harness.send([1, 2, 3], max_new_tokens=20, speculative_draft_len=0)
    harness.send([1, 2, 4], max_new_tokens=20, speculative_draft_len=1, temperature=0.0)
    harness.send([1, 2, 5], max_new_tokens=20, temperature=0.0)
    harness.run()
    state = next(state for state, _ in auto.asked if state.num_decoding == 3)
    assert dict(state.class_counts) == {"greedy, at most 1": 1, "greedy": 1}
    tallies = [t for step in auto.told for t in step.tallies if t.name == "greedy, at most 1"]
    assert tallies and all(t.proposed_by_depth == (1,) * len(t.proposed_by_depth) for t in tallies)
    assert all(not any(t.correct_by_depth[1:]) for t in tallies)
    by_depth = harness.state()["spec_accept_by_position"]
    assert by_depth[0] == by_depth[1] == 1.0, "the general figure counts only what could be accepted"
    only_capped = auto_harness(ToldController())
    only_capped.send([1, 2, 3], max_new_tokens=5, speculative_draft_len=0)
    only_capped.run()
    assert set(only_capped.state()["spec_decisions"]) == {"0:request"}


def test_mixed_steps_are_not_told() -> None:
    auto = ToldController()
    harness = auto_harness(auto, enable_mixed_chunk=True, chunked_prefill_size=4)
    harness.send([1, 2, 3], max_new_tokens=20)
    for _ in range(3):
        harness.step()
    harness.send(list(range(30)), max_new_tokens=3)
    harness.run()
    harness.check_end()
    mixed = [plan for plan in harness.executor.plans if plan.prefill and plan.decode_slots]
    decode = [plan for plan in harness.executor.plans if plan.decode_slots and not plan.prefill]
    assert mixed and len(auto.told) == len(decode)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_shorter_draft_fits_where_the_longest_does_not(page_size: int) -> None:
    """The pool ends one place behind the longest request: its last steps have room for fewer drafts."""
    harness = auto_harness(
        controller({k: 0.01 - 0.001 * k for k in range(4)}),
        num_slots=1, page_size=page_size, num_pages=-(-32 // page_size), use_cache=False, context_len=128,
    )  # fmt: skip
    harness.executor.accept_counts.extend([1] * 200)
    harness.send([1, 2, 3], max_new_tokens=29)
    harness.run()
    harness.check_end()
    reasons = harness.state()["spec_decisions"]
    assert set(lens(harness)) >= {1, 2, 3}, reasons


def test_a_schedule_is_followed_by_rows() -> None:
    harness = SchedulerHarness(spec=CHAIN, **{SCHEDULE: "1:3,2-3:2,4-6:1,7-:0"})
    for start in range(8):
        harness.send([start, 1, 2], max_new_tokens=4 + 4 * start)
    harness.run()
    harness.check_end()
    wanted = {1: 3, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 0, 8: 0}
    seen = {len(p.decode_slots): p.draft_len for p in harness.executor.plans if p.decode_slots}
    assert seen == {rows: wanted[rows] for rows in seen} and {1, 2, 4, 8} <= set(seen)
    assert all(reason.endswith(":batch_size") for reason in harness.state()["spec_decisions"])


def test_the_mode_is_changed_while_requests_run() -> None:
    harness = auto_harness(controller({0: 0.001, 1: 0.1, 2: 0.1, 3: 0.1}), context_len=400, num_pages=600)
    harness.send([1, 2, 3], max_new_tokens=300)
    seen: list[tuple[object, set[int]]] = []
    for change in (
        {THRESHOLD: None}, {THRESHOLD: "auto"}, {SCHEDULE: "1-:2"}, {THRESHOLD: "auto"}, {THRESHOLD: 4},
        {SCHEDULE: "1-4:1,5-:0"}, {THRESHOLD: 0},
    ):  # fmt: skip
        reply = harness.set_state(**change)
        assert reply.ok and reply.body == {name: value for name, value in change.items()}
        state = harness.state()
        assert {THRESHOLD: state[THRESHOLD], SCHEDULE: state[SCHEDULE]} == {
            THRESHOLD: None, SCHEDULE: None, **change,
        }  # fmt: skip
        first = len(harness.executor.plans)
        for _ in range(8):
            harness.step()
        seen.append((change, {p.draft_len for p in harness.executor.plans[first:] if p.decode_slots}))
    assert [found for _, found in seen] == [{3}, {0}, {2}, {0}, {3}, {1}, {0}]
    harness.run()
    harness.check_end()


def test_changes_that_can_not_be_are_refused_and_change_nothing() -> None:
    sets = (GraphSet(0, (1, 2, 4, 8), 1.0, 1), GraphSet(1, (1, 2, 4), 1.0, 1), GraphSet(2, (1,), 1.0, 1))
    harness = SchedulerHarness(spec=CHAIN, graphs=sets, **{SCHEDULE: "1:2,2-4:1,5-:0"})
    before = harness.state()
    for change, words in (
        ({THRESHOLD: "auto"}, "start the server with --speculative-disable-bs-threshold auto, or give it"),
        ({THRESHOLD: 2}, "needs steps of 3 drafts, and those that were prepared have 1, 2"),
        ({THRESHOLD: None}, "needs steps of 3 drafts"),
        ({THRESHOLD: "often"}, "must be an integer >= 0"),
        (
            {SCHEDULE: "1-:3"},
            "3 drafts for 1 requests, and it is prepared for these drafts and at most so many requests: 1",
        ),
        ({SCHEDULE: "1-2:2,3-:0"}, "needs steps of 2 drafts for 2 requests"),
        ({SCHEDULE: "2-:1"}, "must begin at 1"),
        ({SCHEDULE: 4}, "must be a string"),
        ({SCHEDULE: None}, "is ended by setting speculative_disable_bs_threshold"),
        ({THRESHOLD: 0, SCHEDULE: "1-:0"}, "set one of them"),
    ):
        reply = harness.set_state(**change)
        assert not reply.ok and words in reply.error, reply.error
        assert {**harness.state(), "spec_auto": 0} == {**before, "spec_auto": 0}
    assert harness.set_state(**{THRESHOLD: 0}).ok and harness.set_state(**{SCHEDULE: "1-4:1,5-:0"}).ok
    plain = SchedulerHarness().set_state(**{SCHEDULE: "1-:1"})
    assert not plain.ok and "needs a drafter" in plain.error


def test_decisions_are_counted_in_the_metrics() -> None:
    registry = CollectorRegistry()
    auto = controller({0: 0.001, 1: 0.1, 2: 0.1, 3: 0.1})
    harness = auto_harness(auto, metrics=PrometheusSink(SinkLabels(model_name="m"), registry))
    harness.send([1, 2, 3], max_new_tokens=12)
    harness.run()
    harness.set_state(**{THRESHOLD: None})
    harness.send([1, 2, 4], max_new_tokens=12)
    harness.run()
    (found,) = [family for family in registry.collect() if family.name == "sglang:spec_decisions"]
    counted = {
        f"{sample.labels['draft_len']}:{sample.labels['reason']}": sample.value
        for sample in found.samples
        if sample.name.endswith("_total")
    }
    assert counted == harness.state()["spec_decisions"] and counted["3:batch_size"] > 0
    assert sum(counted.values()) == sum(harness.state()["decode_steps"].values())
