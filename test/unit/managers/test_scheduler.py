from __future__ import annotations

import pytest
from helpers.scheduler_harness import SchedulerHarness

from sglang.srt.model_executor.step_plan import SpecShape, StepKind


@pytest.mark.parametrize("disable_overlap", [False, True])
@pytest.mark.parametrize("spec", [None, SpecShape(3), SpecShape(2, 4, 16)])
def test_serves_a_few_requests(spec: SpecShape | None, disable_overlap: bool) -> None:
    harness = SchedulerHarness(spec=spec, disable_overlap=disable_overlap, chunked_prefill_size=5)
    for count in range(1, 7):
        harness.send([count] * count, max_new_tokens=10 + count, stream=count % 2 == 0)
    harness.run()
    harness.check_end()
    assert all(answer.finish.type == "length" for answer in harness.answers.values() if answer.finish)
    assert {plan.kind for plan in harness.executor.plans} == {StepKind.PREFILL, StepKind.DECODE}
