"""A row whose numbers are broken is reported, and the others are as if it were not there."""

from __future__ import annotations

import math

import pytest
from helpers.plan_driver import GREEDY, PlanDriver
from helpers.tiny_executor import tiny_executor

from sglang.srt.model_executor.step_plan import SlotSampling

WARM = SlotSampling(temperature=1.0, seed=8)


FAMILIES = pytest.mark.parametrize(
    "shape,family",
    [((3, 1, 4), "llama"), ((3, 3, 9), "llama"), ((3, 3, 9), "glm-5"), ((2, 4, 16), "gpt-oss")],
    ids=str,
)


@FAMILIES
@pytest.mark.parametrize("speculate", [False, True])
def test_a_broken_cache_ends_one_request(shape: tuple[int, int, int], family: str, speculate: bool) -> None:
    driver = PlanDriver(tiny_executor(shape, family))
    draft_len = shape[0] if speculate else 0
    prompts = [[5, 9, 200], [7, 7], [31, 8, 4, 4]]
    expected = driver.generate(
        [driver.add(p, s) for p, s in zip(prompts, (GREEDY, WARM, WARM), strict=True)], 20
    )
    requests = [driver.add(p, s) for p, s in zip(prompts, (GREEDY, WARM, WARM), strict=True)]
    broken, others = requests[1], [requests[0], requests[2]]
    driver.step(requests, draft_len)
    for pool in driver.executor.worker.pools:
        for tensor in pool.tensors:
            tensor[:, broken.pages[0]] = math.nan
    driver.step(requests, draft_len)
    assert broken.faulty and not any(r.faulty for r in others)
    assert len(broken.output) == sum(broken.counts[:1]) + 1  # the prefill's, those before; no more
    for _ in range(3):  # it may be stepped until the scheduler has heard of it
        driver.step(requests, draft_len)
    assert driver.generate(others, 20, draft_len) == [expected[0], expected[2]]


def test_a_broken_drafter_costs_speed_only() -> None:
    driver = PlanDriver(tiny_executor((3, 3, 9)))
    expected = driver.generate([driver.add([5, 9, 200], WARM)], 20)
    request = driver.add([5, 9, 200], WARM)
    for _ in range(5):
        driver.executor.worker.state.draft_feature[request.slot] = math.nan
        driver.step([request], 3)
    assert driver.generate([request], 20, 3) == expected and not request.faulty


@FAMILIES
def test_a_draft_that_breaks_the_target_is_only_rejected(shape: tuple[int, int, int], family: str) -> None:
    """Its K and V are masked for the nodes before it, and 0 * NaN is NaN: the row would be faulty."""
    driver = PlanDriver(tiny_executor(shape, family))
    prompts = [[5, 9, 200], [7, 7]]
    expected = driver.generate([driver.add(p, WARM) for p in prompts], 20)
    drafted = _record_drafts(driver)
    driver.generate([driver.add(p, WARM) for p in prompts], 20, shape[0])
    rejected = sorted(drafted - {token for ids in (*prompts, *expected) for token in ids})
    assert rejected
    model = driver.executor.worker._runner.model
    model.embed.weight[rejected] = math.nan
    requests = [driver.add(p, WARM) for p in prompts]
    assert driver.generate(requests, 20, shape[0]) == expected
    assert not any(r.faulty for r in requests)


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 9)], ids=str)
def test_tokens_before_a_fault_are_those_of_plain_steps(shape: tuple[int, int, int]) -> None:
    """One of them may be the end of the text: then the fault behind it is nobody's."""
    driver = PlanDriver(tiny_executor(shape))
    prompt, num_together = [5, 9, 200], 0
    expected = driver.generate([driver.add(prompt, WARM)], 20)[0]
    weight = driver.executor.worker._runner.model.embed.weight
    for token in sorted(set(expected[1:]) - {expected[0], *prompt}):
        row = weight[token].clone()
        weight[token] = math.nan
        outputs = []
        for draft_len in (0, shape[0]):
            request = driver.add(prompt, WARM)
            while not request.faulty:
                driver.step([request], draft_len)
            outputs.append(request.output)
            num_together += request.counts[-1] > 0
            driver.release(request)
        assert outputs[0] == outputs[1] == expected[: expected.index(token) + 1]
        weight[token] = row
    assert num_together


def _record_drafts(driver: PlanDriver) -> set[int]:
    drafter = driver.executor.worker.drafter
    assert drafter is not None
    draft, drafted = drafter.draft, set()

    def recorded(ctx, draft_len):
        tree = draft(ctx, draft_len)
        drafted.update(tree.tokens[:, 1:].flatten().tolist())
        return tree

    drafter.draft = recorded
    return drafted
