"""``decode_host_time`` of /server_info: what the host does between a result and the next launch."""

from __future__ import annotations

import pytest
from helpers.fake_executor import FakePending
from helpers.scheduler_harness import SchedulerHarness

from sglang.srt.model_executor.step_plan import GraphSet, StepResult

GRAPHS = (GraphSet(0, (1, 2, 4, 8), 1.0, 1000),)
TICK_S = 0.01  # of the harness's clock, with every look at it


@pytest.mark.parametrize("disable_overlap", [False, True])
def test_steps_that_follow_a_result_are_counted(disable_overlap: bool) -> None:
    harness = SchedulerHarness(disable_overlap=disable_overlap)
    assert harness.state()["decode_host_time"] == {"steps": 0, "schedule_s": 0.0}
    for _ in range(2):  # idle between the two
        harness.send([1, 2, 3], max_new_tokens=6)
        harness.run()
        harness.now += 1000.0
    figures = harness.state()["decode_host_time"]
    # 5 decode steps each. With overlap the first of them is launched before there is any result.
    assert sum(harness.state()["decode_steps"].values()) == 10
    assert figures["steps"] == (10 if disable_overlap else 8)
    assert figures["schedule_s"] == pytest.approx(figures["steps"] * TICK_S)


def test_a_gpus_launches_are_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = SchedulerHarness(graphs=GRAPHS)
    wait = FakePending.wait

    def timed(pending: FakePending) -> StepResult:
        result = wait(pending)
        return StepResult(
            result.step_id, result.tokens, result.faults, 0.001, result.used_graph, launch_time_s=0.25
        )

    monkeypatch.setattr(FakePending, "wait", timed)
    harness.send([1, 2, 3], max_new_tokens=6)
    harness.run()
    figures = harness.state()["decode_host_time"]
    assert figures["launch_s"] == 0.25 * figures["steps"] > 0
