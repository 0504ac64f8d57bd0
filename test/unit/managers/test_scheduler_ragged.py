"""``auto`` gives rows draft lengths of their own: what is planned, counted and told.

Run alone: ``pytest THIS_FILE``.
"""

from __future__ import annotations

from typing import Any

import pytest
from helpers.scheduler_harness import SchedulerHarness

from sglang.srt.managers.decode_tally import NEW_STEPS
from sglang.srt.model_executor.step_plan import GraphSet, SpecShape, StepCost, StepPlan
from sglang.srt.speculative.controller import AutoController, CommittedStep
from sglang.srt.speculative.cost_table import CostTable

CHAIN = SpecShape(3)
THRESHOLD, SCHEDULE = "speculative_disable_bs_threshold", "speculative_bs_schedule"
ROWS = (2, 4, 8)
OWN = ((2, 3), (4, 6), (8, 12))  # rows, tokens of steps with 3 drafts
SETS = (GraphSet(0, ROWS, 0.0, 0), GraphSet(1, ROWS, 0.0, 0), GraphSet(3, ROWS, 0.0, 0, OWN))


class Told(AutoController):
    """A ragged step is the cheapest, whatever is accepted. Keeps what it is told."""

    def __init__(self) -> None:
        costs = [StepCost(k, rows, 0.1, 0.0) for k in (0, 1, 3) for rows in ROWS]
        costs += [StepCost(3, rows, 0.001, 0.0, tokens) for rows, tokens in OWN]
        super().__init__(CostTable.from_costs(costs, padded=True), 3, num_slots=8)
        self.told: list[CommittedStep] = []

    def observe(self, step: CommittedStep) -> None:
        super().observe(step)
        self.told.append(step)


def harness_of(**options: Any) -> SchedulerHarness:
    given = {"spec": CHAIN, "graphs": SETS, "auto": Told(), THRESHOLD: "auto", "ignore": None} | options
    del given["ignore"]
    return SchedulerHarness(**given)


def ragged(harness: SchedulerHarness) -> list[StepPlan]:
    return [plan for plan in harness.executor.plans if plan.row_drafts]


@pytest.mark.parametrize("disable_overlap", [False, True])
def test_rows_get_just_the_drafts_that_a_graph_has_room_for(disable_overlap: bool) -> None:
    auto = Told()
    harness = harness_of(auto=auto, num_pages=700, disable_overlap=disable_overlap)
    names = [harness.send([start, 1, 2], max_new_tokens=60) for start in range(7)]
    harness.run()
    harness.check_end()  # texts are those of plain steps, pages and slots are accounted for
    plans = [plan for plan in ragged(harness) if len(plan.decode_slots) == 7]
    assert plans and all(sum(plan.row_drafts) == 12 - 8 for plan in plans), "a padded row verifies one token"
    steps = [step for step in auto.told if step.decision.size is not None]
    assert steps and all(step.outcomes is not None for step in steps)
    assert len(ragged(harness)) == harness.state()["spec_auto"]["ragged_steps"] == len(steps)
    told = [harness.answers[name].stats for name in names]
    assert sum(stats.decode_steps_plain for stats in told) > 0, "a row without drafts is a plain one"
    for stats in told:
        assert stats.decode_steps_spec > 0
        assert stats.spec_num_correct_drafts <= stats.spec_num_proposed_drafts
        assert sum(stats.spec_correct_drafts_histogram) == stats.decode_steps_spec
    proposed = sum(stats.spec_num_proposed_drafts for stats in told)
    assert 0 < proposed <= sum(sum(plan.row_drafts) or 7 * plan.draft_len for plan in harness.executor.plans)


def test_what_was_tried_is_told_by_depth_and_of_new_requests_alone() -> None:
    auto = Told()
    harness = harness_of(auto=auto, disable_overlap=True)
    for start in range(4):
        harness.send([start, 1, 2], max_new_tokens=90)
    harness.run()
    steps = [step for step in auto.told if step.decision.size is not None]
    first, last = steps[0], steps[-1]
    assert first.tallies and not last.tallies
    drafts, outcomes = first.decision.row_drafts, first.outcomes
    assert outcomes is not None and tuple(outcomes.drafts) == drafts
    (tally,) = first.tallies
    for depth in (1, 2, 3):
        rows = list(zip(outcomes.drafts, outcomes.correct, strict=True))
        assert tally.proposed_by_depth[depth - 1] == sum(k >= depth and m >= depth - 1 for k, m in rows)
        assert tally.correct_by_depth[depth - 1] == sum(m >= depth for _, m in rows)
    telling = [step for step in steps if step.tallies]
    most = sum(tally.proposed_by_depth[0] for step in telling for tally in step.tallies)
    assert most <= 4 * NEW_STEPS


def test_caps_are_kept() -> None:
    harness = harness_of()
    names = [
        harness.send([start, 1, 2], max_new_tokens=40, speculative_draft_len=cap)
        for start, cap in enumerate((None, 0, 1, None))
    ]
    harness.run()
    harness.check_end()
    assert ragged(harness)
    none, one = (harness.answers[name].stats for name in names[1:3])
    assert none.spec_num_proposed_drafts == 0 and len(one.spec_correct_drafts_histogram) <= 2


@pytest.mark.parametrize(
    "change",
    [{THRESHOLD: None}, {THRESHOLD: 4}, {SCHEDULE: "1-:3"}, {THRESHOLD: 0}],
)
def test_other_modes_have_one_draft_length(change: dict[str, Any]) -> None:
    harness = harness_of()
    assert harness.set_state(**change).ok
    for start in range(4):
        harness.send([start, 1, 2], max_new_tokens=10)
    harness.run()
    assert not ragged(harness)
    assert harness.set_state(**{THRESHOLD: "auto"}).ok
    for start in range(4):
        harness.send([start, 1, 2], max_new_tokens=10)
    harness.run()
    assert ragged(harness)


def test_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    harness = harness_of(decode_log_interval=1)
    for start in range(4):
        harness.send([start, 1, 2], max_new_tokens=30)
    harness.run()
    state = harness.state()
    assert state["cuda_graphs"]["spec_3"]["ragged"] == [list(size) for size in OWN]
    assert "ragged" not in state["cuda_graphs"]["plain"]
    assert set(state["spec_decisions"]) <= {f"{k}:{why}" for k in (0, 1, 3) for why in ("cost", "probe")}
    assert state["spec_decisions"]["3:cost"] > 0.8 * len(ragged(harness)) > 0, "but for rows that had ended"
    assert any("mode: spec(k=3, ragged), " in record.getMessage() for record in caplog.records)
    corrections = state["spec_auto"]["cost_corrections"]["by_draft_len_rows_and_tokens"]
    assert set(corrections) <= {"3x2:3", "3x4:6", "3x8:12"} and corrections
