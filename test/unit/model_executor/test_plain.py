"""Plain decoding by hand-made plans equals ``transformers.generate``; prefill in any cut is the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.tiny_executor import target_folder, tiny_executor
from transformers import AutoModelForCausalLM

from sglang.srt.model_executor.step_plan import (
    PAD_SLOT,
    PageWrite,
    PrefillChunk,
    SlotAdmission,
    SlotSampling,
    StepKind,
    StepPlan,
)

PROMPTS = [[5, 9, 200, 31], [7], list(range(40, 75)), [250, 3, 3, 3, 17, 90, 4]]
WARM = SlotSampling(temperature=1.0, seed=11, frequency_penalty=0.3)


def _generate(family: str, prompt: list[int], num_tokens: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(target_folder(family), dtype=torch.float64)
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_equals_transformers(family: str, page_size: int) -> None:
    driver = PlanDriver(tiny_executor(family=family, page_size=page_size))
    requests = [driver.add(prompt) for prompt in PROMPTS]
    outputs = driver.generate(requests, 40)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output == _generate(family, prompt, 40)


def test_chunks_batches_and_mixed_steps_change_nothing() -> None:
    driver = PlanDriver(tiny_executor((3, 1, 4), page_size=4))
    expected = driver.generate([driver.add(PROMPTS[2], WARM)], 30)[0]
    chunked = [driver.add(PROMPTS[2], WARM, chunk=chunk) for chunk in (1, 5, 34)]
    assert driver.generate(chunked, 30) == [expected] * 3
    # Two prompts arrive, in chunks, while another request decodes in the same steps.
    running = driver.add(PROMPTS[2], WARM)
    new = [DrivenRequest(driver.free_slots.pop(), list(PROMPTS[2]), WARM) for _ in range(2)]
    for start in range(0, 35, 10):
        chunks = [(r, start, min(start + 10, 35)) for r in new]
        plan = driver.plan(decode=[running], prefill=chunks)
        assert plan.kind is StepKind.MIXED
        driver.run(plan, [running, *new])
    assert running.counts == [1, 1, 1, 1] and [len(r.output) for r in new] == [1, 1]
    assert driver.generate([running, *new], 30) == [expected] * 3


def test_a_retracted_request_goes_on_as_if_nothing_had_happened() -> None:
    driver = PlanDriver(tiny_executor((3, 1, 4)))
    expected = driver.generate([driver.add(PROMPTS[0], WARM)], 40)[0]
    request = driver.add(PROMPTS[0], WARM)
    driver.generate([request], 20, 3)
    driver.release(request)
    request.slot = driver.free_slots.pop()
    for plan in driver.prefill_plans(request, 7):
        driver.run(plan, [request])
    assert driver.generate([request], 40, 3)[0] == expected


def test_a_shared_prefix_is_used() -> None:
    """A second request borrows the pages of the first for all but its last prompt token."""
    driver = PlanDriver(tiny_executor((3, 1, 4)))
    prompt = PROMPTS[2]
    first = driver.add(prompt, WARM)
    expected = driver.generate([first], 30, 3)[0]
    second = DrivenRequest(driver.free_slots.pop(), list(prompt), WARM, pages=first.pages[:34])
    plan = driver.plan(prefill=[(second, 34, 35)])
    admission = SlotAdmission(second.slot, 35, 34, WARM)
    shared = PageWrite(second.slot, 0, tuple(first.pages[:34]))
    plan = replace(plan, admissions=(admission,), page_writes=(shared, *plan.page_writes))
    driver.run(plan, [second])
    assert driver.generate([second], 30, 3)[0] == expected


@pytest.mark.parametrize("draft_len", [0, 3])
def test_pad_rows_change_nothing(draft_len: int) -> None:
    driver = PlanDriver(tiny_executor((3, 1, 4)))
    state = driver.executor.worker.state
    requests = [driver.add(prompt, WARM) for prompt in PROMPTS[:2]]
    alone = [driver.add(prompt, WARM) for prompt in PROMPTS[:2]]
    before = [t[PAD_SLOT].clone() for t in (state.seq_len, state.next_token, state.draft_feature)]
    for _ in range(10):
        plan = driver.plan(decode=requests, draft_len=draft_len)
        padded = StepPlan(
            plan.step_id,
            plan.kind,
            (PAD_SLOT, requests[0].slot, PAD_SLOT, requests[1].slot),
            (1, plan.decode_len_bounds[0], 1, plan.decode_len_bounds[1]),
            draft_len,
            page_writes=plan.page_writes,
        )
        result = driver.executor.launch(padded).wait()
        assert result.tokens[0] == result.tokens[2] == () and not any(result.faults)
        requests[0].output += result.tokens[1]
        requests[1].output += result.tokens[3]
    after = [t[PAD_SLOT] for t in (state.seq_len, state.next_token, state.draft_feature)]
    assert all(a.equal(b) for a, b in zip(before, after, strict=True)) and int(state.seq_len[PAD_SLOT]) == 1
    assert (state.page_table[PAD_SLOT] == 0).all()
    num_tokens = min(len(r.output) for r in requests)
    assert driver.generate(alone, num_tokens) == [r.output[:num_tokens] for r in requests]


def test_broken_plans_and_failures_are_loud() -> None:
    executor = tiny_executor((3, 1, 4))
    good = StepPlan(2, StepKind.IDLE)
    bad = executor.launch(StepPlan(1, StepKind.DECODE, (99,), (1,)))
    later = executor.launch(good)  # does not block, and does not run
    with pytest.raises(AssertionError, match="slots"):
        bad.wait()
    with pytest.raises(AssertionError, match="slots"):
        later.wait()
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(RuntimeError, match="after shutdown"):
        executor.launch(good)


def test_an_earlier_chunk_puts_out_nothing() -> None:
    driver = PlanDriver(tiny_executor())
    request = DrivenRequest(driver.free_slots.pop(), [4, 5, 6])
    first, last = driver.prefill_plans(request, 2)
    assert first.prefill == (PrefillChunk(request.slot, 0, (4, 5), 6),)
    result = driver.run(first, [request])
    assert result.tokens == ((),) and result.faults == (False,) and result.device_time_s > 0
    assert len(driver.run(last, [request]).tokens[0]) == 1
