"""Tokens of a speculative step on the held-out prompts, up to the end of each answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmark.spec_toggle.prompts import EXPECTED_ACCEPT
from sglang.bench_one_batch_cases import OneBatch, Step, places_needed
from sglang.srt.model_executor.executor import Executor

CHAT = ("chat_template", "chat_free")  # domains that the expectations also have as one: chat


@dataclass(frozen=True, slots=True)
class Accepted:
    tokens: int = 0
    steps: int = 0

    @property
    def length(self) -> float:
        return self.tokens / self.steps if self.steps else 0.0

    def __add__(self, other: Accepted) -> Accepted:
        return Accepted(self.tokens + other.tokens, self.steps + other.steps)


def accepted_of(
    executor: Executor,
    prompts: Sequence[Sequence[int]],
    eos_ids: Sequence[int],
    draft_len: int,
    output_len: int,
    rows: int,
) -> list[Accepted]:
    """One for each prompt; ``rows`` of them run at a time."""
    found: list[Accepted] = []
    # Batches of about equal prompts: less prefill in one step, and places for what is needed.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for first in range(0, len(order), rows):
        part = [prompts[index] for index in order[first : first + rows]]
        batch = OneBatch(executor, part, places_needed(executor, max(map(len, part)), output_len))
        batch.prefill()
        steps = batch.decode_all([draft_len], output_len)
        found += [_count(steps, row.slot, row.output[:output_len], eos_ids) for row in batch.rows]
    return [counted for _, counted in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def _count(steps: Sequence[Step], slot: int, output: Sequence[int], eos_ids: Sequence[int]) -> Accepted:
    """Steps of one row until it has put out an end of text or its last token. The first token, which the
    prefill made, does not count."""
    ends = [index for index, token in enumerate(output) if token in eos_ids]
    length = ends[0] + 1 if ends else len(output)
    have, num_steps = 1, 0
    for step in steps:
        if slot in step.slots and have < length:
            have += step.counts[step.slots.index(slot)]
            num_steps += 1
    return Accepted(min(have, length) - 1, num_steps)


def expected_lengths(file: Path = EXPECTED_ACCEPT) -> dict[str, float]:
    """Domain -> greedy accept length with 3 drafts."""
    greedy = json.loads(file.read_text())["greedy"]
    return {domain: float(entry["accept_length_3"]) for domain, entry in greedy.items()}
