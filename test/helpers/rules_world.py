"""Requests with rules about what may follow what, and what plain decode alone gives with them.

The reference has no state between tokens: what may follow is told from the whole text, every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from helpers.grammar_world import GrammarReference
from helpers.processors import Fickle, fickle
from helpers.scheduler_harness import decode
from helpers.toggle_schedule import VOCAB, Schedule

from sglang.srt.constrained.grammar import Masks, spec_of
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.sampling.sampling_params import ChoiceRules, ReasoningEnd, ThinkingLimit

PATTERNS = ("[ab]{4}", "(?<=h)[^h]", "[fg]+a$", "c[^c]c|d{4}", "(?i)HHH")
END_IDS = (101, 107)  # likely enough to come from a random model
END = decode(END_IDS)


def with_rules(
    schedule: Schedule, free_text: Callable[[GenerateRequest], list[int]], share: float = 0.7
) -> Schedule:
    """Some of its requests have rules. ``free_text``: what comes without, so that they have a say."""
    rng = random.Random(schedule.seed)
    arrivals = []
    for arrival in schedule.arrivals:
        message = arrival.message
        if rng.random() < share:
            ids = free_text(message)
            words = _words(rng, ids) if rng.random() < 0.6 else ()
            thinking = _thinking(rng, ids) if rng.random() < 0.6 else None
            sampling = message.sampling
            if rng.random() < 0.6:
                sampling = replace(sampling, stop_regex=(rng.choice(PATTERNS),))
            message = GenerateRequest(
                message.rid, message.input_ids, sampling, message.stream, message.received_ts,
                message.reasoning_end,
                ChoiceRules(words, thinking) if words or thinking else None,
            )  # fmt: skip
        elif spec_of(message.sampling) is None:
            message = _processed(rng, message)
        arrivals.append(replace(arrival, message=message))
    config = replace(schedule.config, runs_processors=True)
    return replace(schedule, arrivals=tuple(arrivals), config=config)


def _processed(rng: random.Random, message: GenerateRequest) -> GenerateRequest:
    """With a custom logit processor."""
    sampling = replace(message.sampling, custom_params=json.dumps({"modulus": rng.choice((2, 3, 5))}))
    return GenerateRequest(
        message.rid, message.input_ids, sampling, message.stream, message.received_ts,
        processor=Fickle.to_str(),
    )  # fmt: skip


def _words(rng: random.Random, ids: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    words = set()
    for _ in range(rng.randint(1, 6)):
        size, at = rng.choice((1, 2, 2, 3)), rng.randrange(len(ids))
        words.add(tuple(ids[at : at + size]))
    return tuple(sorted(words))


def _thinking(rng: random.Random, ids: Sequence[int]) -> ThinkingLimit:
    begin_id = rng.choice((None, None, ids[0]))
    return ThinkingLimit(rng.choice((0, 1, 3, 6, 12)), ReasoningEnd(END, begin_id), END_IDS)


class RulesReference(GrammarReference):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._last: dict[str, tuple[GenerateRequest, tuple[list[int], str, bool]]] = {}

    def _generate(self, message: GenerateRequest) -> tuple[list[int], str, bool]:
        """Once for a schedule, whoever carries it out."""
        known = self._last.get(message.rid)
        if known is None or known[0] is not message:
            known = self._last[message.rid] = (message, super()._generate(message))
        return known[1]

    def _mask(self, message: GenerateRequest, output: Sequence[int]) -> Masks:
        if spec_of(message.sampling) is None:
            mask = np.full((1, VOCAB // 32), -1, np.int32)
        else:
            mask = super()._mask(message, output)
        allowed = set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
        rules = message.rules or ChoiceRules()
        if message.processor is not None:
            modulus = json.loads(message.sampling.custom_params or "")["modulus"]
            allowed &= fickle(len(message.input_ids), list(output), modulus, VOCAB)
        if rules.thinking is not None:
            allowed = (allowed & _forced(rules.thinking, list(output))) or allowed
        behind = [
            word for word in rules.bad_words if tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
        ]
        behind = [word for word in behind if len(word) - 1 <= len(output)]
        allowed = (allowed - {word[-1] for word in behind}) or allowed
        bits = np.zeros(VOCAB, np.uint8)
        bits[sorted(allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32).reshape(1, -1)

    def _has_ended(self, message: GenerateRequest, output: Sequence[int]) -> bool:
        return spec_of(message.sampling) is not None and super()._has_ended(message, output)


def _forced(limit: ThinkingLimit, output: list[int]) -> set[int]:
    """All that may follow, as far as the budget is concerned."""
    begin_id = limit.end.begin_id
    if begin_id is not None and (not output or output[0] != begin_id):
        return set(range(VOCAB))
    thought = output if begin_id is None else output[1:]
    end = list(limit.end_ids)
    if limit.end.text in decode(thought) or len(thought) < limit.budget:
        return set(range(VOCAB))
    begun = max(n for n in range(len(end)) if n == 0 or thought[-n:] == end[:n])
    return {end[begun]}
