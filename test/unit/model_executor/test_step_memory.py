"""No step needs more than what the pools leave free. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.peak_memory import PeakMemory
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_executor.step_memory import StepSizes, step_bytes
from sglang.srt.model_executor.step_plan import SlotSampling, SpecShape, StepPlan

SLOTS, CONTEXT, CHUNK, POOL, VOCAB, DRAFT_VOCAB = 6, 400, 100, 2400, 4096, 2048
EVERYTHING = SlotSampling(temperature=1.0, top_p=0.9999, top_k=3000, repetition_penalty=1.1, seed=3)
SIZES = StepSizes(SLOTS, SLOTS * CHUNK, CONTEXT, POOL, None, 0)


def models(family: str = "llama") -> tuple[ModelConfig, ModelConfig]:
    target = ModelConfig.from_folder(target_folder(family, VOCAB), CONTEXT)
    return target, ModelConfig.from_draft_folder(draft_folder(family, VOCAB, DRAFT_VOCAB), CONTEXT)


class Measured(PlanDriver):
    """Carries out plans in this thread, and notes the most memory that one needed."""

    peak = 0

    def run(self, plan: StepPlan, requests: list[DrivenRequest]) -> None:  # type: ignore[override]
        with PeakMemory() as memory:
            done = self.executor.worker.execute(plan)
        self.peak = max(self.peak, memory.peak)
        assert done is not None
        for row, request in enumerate(requests):
            *tokens, count, _ = done.packed[row].tolist()
            request.output += tokens[:count]


@pytest.mark.parametrize(
    "shape,family",
    [
        (None, "llama"),
        ((3, 1, 4), "llama"),
        ((2, 4, 16), "llama"),
        (None, "gpt-oss"),
        ((2, 4, 16), "glm4-moe"),
        (None, "glm-5"),
        ((3, 1, 4), "deepseek-v3"),
    ],
    ids=str,
)
def test_no_step_needs_more_than_the_bound(shape: tuple[int, int, int] | None, family: str) -> None:
    executor = tiny_executor(
        shape, family, vocab_size=VOCAB, draft_vocab=DRAFT_VOCAB, dtype="float32", max_total_tokens=POOL,
        max_running_requests=SLOTS, context_length=CONTEXT,
    )  # fmt: skip
    driver = Measured(executor, poison=False)
    requests = [
        DrivenRequest(driver.free_slots.pop(), [(7 * i + row) % VOCAB for i in range(3 * CHUNK)], EVERYTHING)
        for row in range(SLOTS)
    ]
    for start in range(0, 3 * CHUNK, CHUNK):
        driver.run(driver.plan(prefill=[(r, start, start + CHUNK) for r in requests]), requests)
    for draft_len in (0, 0, *([shape[0]] * 3 if shape else [])):
        driver.run(driver.plan(decode=requests, draft_len=draft_len), requests)
    executor.shutdown()
    sizes = SIZES if shape is None else replace(SIZES, spec=SpecShape(*shape), max_spec_rows=SLOTS)
    target, drafter = models(family)
    bound = step_bytes(target, drafter if shape else None, sizes, torch.float32.itemsize)
    assert driver.peak <= bound <= 8 * driver.peak


@pytest.mark.parametrize(
    "larger",
    [
        {"num_slots": 60},
        {"prefill_tokens": 6000},
        {"context_len": 4000},
        {"max_spec_rows": 60},
    ],
)
def test_larger_steps_need_more(larger: dict[str, int]) -> None:
    sizes = replace(SIZES, spec=SpecShape(2, 4, 16), max_spec_rows=SLOTS)
    target, drafter = models()
    small = step_bytes(target, drafter, sizes, 4)
    assert step_bytes(target, drafter, replace(sizes, **larger), 4) > small
    assert step_bytes(target, drafter, replace(sizes, pool_tokens=100), 4) < small
    assert step_bytes(target, drafter, sizes, 8) > small > step_bytes(target, None, SIZES, 4)
