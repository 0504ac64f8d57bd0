"""``DecodeStep`` (what a CUDA graph holds) against ``StepRunner``, its oracle, on a CPU."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.model_executor.step_plan import PAD_SLOT, SlotSampling, StepKind, StepPlan

GREEDY = SlotSampling(temperature=0.0)
SAMPLINGS = (
    GREEDY,
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=5),
    SlotSampling(temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.2),
    SlotSampling(temperature=1.3, seed=2**63 + 7, draft_cap=1, presence_penalty=0.5),
    SlotSampling(temperature=0.0, logit_bias=((7, 3.0), (200, -50.0)), min_new_tokens=6, suppressed_ids=(2,)),
)
SHAPES = [None, (3, 1, 4), (2, 4, 16), (5, 4, 8)]


def drive(driver: PlanDriver, modes: list[int], num_tokens: int) -> list[DrivenRequest]:
    rng = random.Random(7)
    requests = []
    for index, sampling in enumerate(SAMPLINGS):
        prompt = [rng.randrange(3, 250) for _ in range(5 + 17 * index)]
        requests.append(driver.add(prompt, sampling, chunk=16))
    step = 0

    def draft_len() -> int:
        nonlocal step
        step += 1
        return modes[step % len(modes)]

    driver.generate(requests, num_tokens, draft_len)
    return requests


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_same_tokens_as_the_runner_in_any_mode(
    shape: tuple[int, int, int] | None, family: str, page_size: int
) -> None:
    draft = None if shape is None else draft_folder(family)
    most = shape[0] if shape else 0
    modes = [0, most, most, 0, max(most - 1, 0), most]
    kernels = PlanDriver(kernel_executor(target_folder(family), draft, shape, page_size))
    oracle = PlanDriver(tiny_executor(shape, family, dtype="float32", page_size=page_size))
    got, expected = (drive(driver, modes, 24) for driver in (kernels, oracle))
    for request, other in zip(got, expected, strict=True):
        assert request.output == other.output
        assert request.counts == other.counts
    if shape is not None:
        assert any(count > 1 for request in got for count in request.counts)
    for driver in (kernels, oracle):
        driver.executor.shutdown()


@pytest.mark.parametrize("shape", [(3, 1, 4), (2, 4, 16)])
def test_padded_rows_leave_their_slot_and_page_as_they_were(shape: tuple[int, int, int]) -> None:
    executor = kernel_executor(target_folder(), draft_folder(), shape, 4)
    driver = PlanDriver(executor)
    requests = [driver.add([5, 6, 7, 8], SlotSampling(temperature=1.0, seed=3)) for _ in range(2)]
    state, pools = executor.worker.state, executor.worker.pools

    def of_padding() -> list[torch.Tensor]:
        rows = [t[PAD_SLOT] for t in (state.seq_len, state.next_token, state.draft_feature, state.page_table)]
        return [t.clone() for t in (*rows, *(pool.kv[:, : pool.page_size] for pool in pools))]

    before = of_padding()
    for draft_len in (0, shape[0], 0, 1):
        slots = (requests[0].slot, PAD_SLOT, requests[1].slot, PAD_SLOT)
        plan = driver.plan(decode=requests, draft_len=draft_len)
        lens = (plan.decode_len_bounds[0], 1, plan.decode_len_bounds[1], 1)
        padded = StepPlan(plan.step_id, StepKind.DECODE, slots, lens, draft_len, page_writes=plan.page_writes)
        result = executor.launch(padded).wait()
        assert result.tokens[1] == result.tokens[3] == ()
        for request, tokens in zip(requests, result.tokens[::2], strict=True):
            request.output += tokens
    # The tree's levels and the chain's forwards write to the pad page, which nothing reads; the
    # state of the slot is what counts, and that the page stays finite.
    after = of_padding()
    assert all(torch.equal(a, b) for a, b in zip(before[:4], after[:4], strict=True))
    assert all(t.isfinite().all() for t in after[4:])
    assert [r.output for r in requests[:1]] == [r.output for r in requests[1:]]
    executor.shutdown()
