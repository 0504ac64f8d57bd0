"""At a temperature, tokens of either mode are drawn from the target's softmax."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.tiny_executor import target_folder, tiny_executor
from transformers import AutoModelForCausalLM

from sglang.srt.model_executor.step_plan import SlotSampling

VOCAB = 12
PROMPT = [3, 7, 1, 9]
BATCH = 256
NUM_BATCHES = 16
TEMPERATURE = 1.4


@cache
def _exact() -> tuple[torch.Tensor, torch.Tensor]:
    """p(y0, y1) [V, V] and p(y1, y2) [V, V] of the three tokens after the prompt."""
    model = AutoModelForCausalLM.from_pretrained(target_folder("llama", VOCAB), dtype=torch.float64)

    def next_probs(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return (model(ids).logits[:, -1].double() / TEMPERATURE).softmax(-1)

    prompt = torch.tensor([PROMPT])
    every = torch.arange(VOCAB)
    first = next_probs(prompt)[0]  # [V]
    two = torch.cat([prompt.expand(VOCAB, -1), every[:, None]], 1)
    second = next_probs(two)  # [y0, y1]
    pairs = torch.cartesian_prod(every, every)
    third = next_probs(torch.cat([prompt.expand(VOCAB**2, -1), pairs], 1)).view(VOCAB, VOCAB, VOCAB)
    joint = first[:, None] * second
    return joint, torch.einsum("ab,abc->bc", joint, third)


def _draw(shape: tuple[int, int, int] | None, draft_len: int) -> torch.Tensor:
    """[samples, 3] tokens, a seed each."""
    executor = tiny_executor(
        shape,
        vocab_size=VOCAB,
        draft_vocab=None,
        dtype="float32",
        max_running_requests=BATCH,
        max_total_tokens=BATCH * 32,
        context_length=64,
    )
    driver = PlanDriver(executor, poison=False)
    rows: list[list[int]] = []
    for batch in range(NUM_BATCHES):
        requests = [
            DrivenRequest(
                driver.free_slots.pop(),
                list(PROMPT),
                SlotSampling(temperature=TEMPERATURE, seed=batch * BATCH + i),
            )
            for i in range(BATCH)
        ]
        driver.run(driver.plan(prefill=[(r, 0, len(PROMPT)) for r in requests]), requests)
        rows += driver.generate(requests, 3, draft_len)
        for request in requests:
            driver.release(request)
    return torch.tensor(rows)


@pytest.mark.parametrize("shape", [None, (2, 1, 3), (2, 3, 7)], ids=str)
def test_tokens_are_drawn_from_the_softmax(shape: tuple[int, int, int] | None) -> None:
    tokens = _draw(shape, shape[0] if shape else 0)
    for pair, expected in zip(((0, 1), (1, 2)), _exact(), strict=True):
        cells = tokens[:, pair[0]] * VOCAB + tokens[:, pair[1]]
        counts = torch.bincount(cells, minlength=VOCAB**2).double()
        wanted = expected.flatten() * len(tokens)
        keep = wanted >= 5
        rest = torch.stack([counts[~keep].sum(), wanted[~keep].sum()])
        statistic = float(((counts - wanted)[keep] ** 2 / wanted[keep]).sum())
        statistic += float((rest[0] - rest[1]) ** 2 / rest[1]) if rest[1] > 0 else 0.0
        degrees = int(keep.sum())
        assert statistic < degrees + 5 * math.sqrt(2 * degrees)
