"""SmolLM2's greedy text, plain and speculative, equals that of ``transformers.generate``.

50 prompts x 128 tokens, float32: ``pytest -m long -s`` on this file.

Some minutes; the suite runs half as far with four prompts of it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers.plan_driver import PlanDriver

from sglang.embedded.gguf_source import EmbeddedModelError
from sglang.embedded.model import embedded_drafter_path, embedded_model_path
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.managers.executor_build import build_executor

PROMPTS = Path(__file__).resolve().parents[3] / "benchmark" / "prompts" / "heldout.jsonl"
NUM_TOKENS = 128
MOST_PROMPT_TOKENS = 200
BATCH = 10


def prompts(tokenizer, count: int) -> list[list[int]]:  # type: ignore[no-untyped-def]
    """Evenly over the file, so over all domains; cut so that a batch needs little padding."""
    lines = PROMPTS.read_text().splitlines()
    texts = [json.loads(line)["text"] for line in lines[:: max(1, len(lines) // count)]][:count]
    return [tokenizer(text, add_special_tokens=False).input_ids[:MOST_PROMPT_TOKENS] for text in texts]


def transformers_text(folder: str, batch: Sequence[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy ids up to ``<|im_end|>``, left-padded as generate wants it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    width = max(map(len, batch))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=mask, max_new_tokens=num_tokens, do_sample=False)
    eos = model.generation_config.eos_token_id
    return [up_to(eos, row[width:].tolist()) for row in out]


def up_to(eos: int, ids: list[int]) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


def check(count: int, batch: int, num_tokens: int = NUM_TOKENS) -> None:
    from transformers import AutoTokenizer

    try:
        folder = embedded_model_path()
    except EmbeddedModelError as error:
        pytest.skip(str(error))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    executor = build_executor(
        ExecutorArgs(folder, embedded_drafter_path(), max_total_tokens=20_000, max_running_requests=batch)
    )
    driver = PlanDriver(executor)
    todo = prompts(tokenizer, count)
    equal = {0: 0, 3: 0}
    for start in range(0, len(todo), batch):
        part = todo[start : start + batch]
        expected = transformers_text(folder, part, num_tokens)
        for draft_len in equal:
            requests = [driver.add(p) for p in part]
            texts = driver.generate(requests, num_tokens, draft_len)
            eos = tokenizer.eos_token_id
            equal[draft_len] += sum(up_to(eos, t) == e for t, e in zip(texts, expected, strict=True))
            for request in requests:
                driver.release(request)
    executor.shutdown()
    print(f"\nequal to transformers: {equal[0]} of {count} plain, {equal[3]} of {count} with 3 drafts")
    assert equal == {0: count, 3: count}


def test_a_few_prompts() -> None:
    check(4, 4, NUM_TOKENS // 2)


@pytest.mark.long
@pytest.mark.timeout(0)
def test_fifty_prompts() -> None:
    check(50, BATCH)
