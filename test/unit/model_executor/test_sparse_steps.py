"""``DecodeStep`` over models with an indexer (DSA) against ``StepRunner``, its oracle, on a CPU."""

from __future__ import annotations

import random

import pytest
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.model_executor.step_plan import SlotSampling

SAMPLINGS = (SlotSampling(temperature=0.0), SlotSampling(temperature=1.0, seed=11))
CASES = {
    "glm-5 plain": ("glm-5", None, None),
    "glm-5 chain of its own head": ("glm-5", "nextn", (3, 1, 4)),
    "glm-5 tree of its own head": ("glm-5", "nextn", (3, 2, 6)),
    "glm-5 tree of eagle3": ("glm-5", "eagle3", (2, 4, 8)),
    "deepseek-v3.2 chain of eagle3": ("deepseek-v3.2", "eagle3", (3, 1, 4)),
}


def drive(driver: PlanDriver, modes: list[int]) -> list[DrivenRequest]:
    """12 places are chosen: one prompt is shorter, one longer, and one has a chunk that begins shorter."""
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 250) for _ in range(length)] for length in (5, 23, 40)]
    requests = [driver.add(p, SAMPLINGS[i % 2], chunk=16) for i, p in enumerate(prompts)]
    step = 0

    def draft_len() -> int:
        nonlocal step
        step += 1
        return modes[step % len(modes)]

    driver.generate(requests, 14, draft_len)
    return requests


@pytest.mark.parametrize("case", CASES)
def test_same_tokens_as_the_runner_in_any_mode(case: str) -> None:
    family, drafter, shape = CASES[case]
    most = shape[0] if shape else 0
    modes = [0, most, most, 0, max(most - 1, 0), most]
    draft = draft_folder(family) if drafter == "eagle3" else target_folder(family) if drafter else None
    kind = "NEXTN" if drafter == "nextn" else None
    kernels = PlanDriver(kernel_executor(target_folder(family), draft, shape, 4, draft_kind=kind))
    oracle = PlanDriver(
        tiny_executor(shape, family, drafter=drafter or "eagle3", dtype="float32", page_size=4)
    )
    got, expected = (drive(driver, modes) for driver in (kernels, oracle))
    for request, other in zip(got, expected, strict=True):
        assert request.output == other.output
        assert request.counts == other.counts
    if shape is not None:
        assert any(count > 1 for request in got for count in request.counts)
    for driver in (kernels, oracle):
        driver.executor.shutdown()
