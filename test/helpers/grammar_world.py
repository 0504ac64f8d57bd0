"""Grammars over the tiny models' vocabulary of bytes, and what plain decode alone gives with one.

The reference keeps no state between tokens but a fresh matcher's: every mask is computed from the whole text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.scheduler_harness import Answer
from helpers.toggle_reference import end_of, slot_sampling
from helpers.toggle_schedule import EOS_IDS, VOCAB, Schedule

from sglang.srt.constrained.backends import _make
from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import (
    CompiledGrammar,
    GrammarKind,
    GrammarSpec,
    JsonOptions,
    Masks,
    allow,
    spec_of,
)
from sglang.srt.constrained.vocabulary import Vocabulary
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import StepMidInput, StepPlan
from sglang.srt.sampling.sampling_params import ReasoningEnd

REASONING_END = "ek"  # likely enough to come from a random model's drafts
SCHEMA = (
    '{"type":"object","properties":{"a":{"type":"integer","minimum":0,"maximum":9999},"b":{"enum":["x","yy"]},'
    '"c":{"type":"array","items":{"type":"boolean"},"maxItems":3}},"required":["a","b","c"],'
    '"additionalProperties":false}'
)
TAG = (
    '{"type":"structural_tag","triggers":["k"],"structures":[{"begin":"kk","schema":{"type":"integer"},'
    '"end":";"}]}'
)
SPECS = (
    GrammarSpec(GrammarKind.JSON, SCHEMA),
    GrammarSpec(GrammarKind.JSON, '{"type":"object"}'),
    GrammarSpec(GrammarKind.REGEX, "(ab|ba|[c-z]{2}){1,9}0?"),
    GrammarSpec(GrammarKind.REGEX, "[0-9]{3}"),
    GrammarSpec(GrammarKind.EBNF, 'root ::= "(" root ")" | "[" root root "]" | "x"'),
    GrammarSpec(GrammarKind.STRUCTURAL_TAG, TAG),
)


@cache
def byte_vocabulary(size: int = VOCAB) -> Vocabulary:
    tokens = tuple(bytes([token]) if token < 256 else b"" for token in range(size))
    return Vocabulary(tokens, frozenset(), EOS_IDS)


@cache
def compiler(backend: str) -> GrammarCompiler:
    """With all of SPECS compiled: nothing in a schedule depends on how long that takes."""
    vocabulary = byte_vocabulary()
    made = GrammarCompiler(lambda: (_make(backend, vocabulary, JsonOptions()), vocabulary))
    for spec in SPECS:
        compiled(made, spec)
    return made


def compiled(grammars: GrammarCompiler, spec: GrammarSpec) -> CompiledGrammar:
    compilation = grammars.compilation(spec)
    deadline = time.monotonic() + 60
    while not compilation.is_done and time.monotonic() < deadline:
        grammars.wait(0.05)
        grammars.poll()
    assert compilation.compiled is not None, compilation.error
    return compilation.compiled


def with_grammars(schedule: Schedule, share: float = 0.6) -> Schedule:
    """Some of its requests have a grammar, some of these after a free part."""
    rng = random.Random(schedule.seed)
    arrivals = []
    for arrival in schedule.arrivals:
        message = arrival.message
        if rng.random() < share:
            spec = rng.choice(SPECS)
            sampling = replace(message.sampling, **spec.params())
            end = ReasoningEnd(REASONING_END, rng.choice((None, 107))) if rng.random() < 0.4 else None
            message = GenerateRequest(
                message.rid, message.input_ids, sampling, message.stream, message.received_ts, end
            )
        arrivals.append(replace(arrival, message=message))
    return replace(schedule, arrivals=tuple(arrivals))


@dataclass
class GrammarReference:
    executor: InProcessExecutor
    grammars: GrammarCompiler

    def __post_init__(self) -> None:
        self._driver = PlanDriver(self.executor)

    def check(self, message: GenerateRequest, answer: Answer) -> bool:
        """Whether the text ended with its grammar's end."""
        assert answer.finish is not None
        ids, kind, ended = self._generate(message)
        if answer.finish.type == "abort":
            assert answer.finish.status_code is None and answer.ids == ids[: len(answer.ids)]
            return False
        assert answer.ids == ids, f"{message.rid}: {answer.ids} instead of {ids} ({message.sampling})"
        assert answer.finish.type == kind, f"{message.rid}: {answer.finish} instead of {kind}"
        return ended

    def _generate(self, message: GenerateRequest) -> tuple[list[int], str, bool]:
        driver, params = self._driver, message.sampling
        sampling = replace(slot_sampling(params), min_new_tokens=0, suppressed_ids=())
        request = DrivenRequest(driver.free_slots.pop(), list(message.input_ids), sampling)
        stops = params.stop_token_ids if params.ignore_eos else (*EOS_IDS, *params.stop_token_ids)
        try:
            plan = next(iter(driver.prefill_plans(request)))
            while True:
                mask = self._mask(message, request.output)
                if len(request.output) < params.min_new_tokens:
                    kept = _without(mask, stops)
                    mask = kept if kept.any() else mask
                self._step(plan, request, mask)
                num_kept, kind = end_of(params, request.output)
                if kind != "unfinished":
                    return request.output[:num_kept], kind, self._has_ended(message, request.output)
                if self._has_ended(message, request.output):
                    return request.output, "stop", True
                plan = driver.plan(decode=[request])
        finally:
            driver.release(request)

    def _step(self, plan: StepPlan, request: DrivenRequest, mask: Masks) -> None:
        plan = replace(plan, masked=True)
        pending = self.executor.launch(plan)
        self.executor.supply(StepMidInput(plan.step_id, (0,), 1, memoryview(mask.tobytes())))
        request.output += pending.wait().tokens[0]

    def _constrained(self, message: GenerateRequest, output: Sequence[int]) -> list[int] | None:
        """The part that the grammar is about; None: it has not begun."""
        end = message.reasoning_end
        if end is None or (end.begin_id is not None and output[:1] != [end.begin_id]):
            return list(output)
        text = bytes(output if end.begin_id is None else output[1:])
        at = text.find(end.text.encode())
        return None if at < 0 else list(text[at + len(end.text) :])

    def _mask(self, message: GenerateRequest, output: Sequence[int]) -> Masks:
        masks = np.full((1, VOCAB // 32), -1, np.int32)
        constrained = self._constrained(message, output)
        if constrained is not None:
            spec = spec_of(message.sampling)
            assert spec is not None
            matcher = compiled(self.grammars, spec).matcher()
            assert all([matcher.accept(token) for token in constrained])
            matcher.fill(masks, 0)
            if (
                message.reasoning_end is not None
                and not output
                and message.reasoning_end.begin_id is not None
            ):
                allow(masks[0], message.reasoning_end.begin_id)
        return masks

    def _has_ended(self, message: GenerateRequest, output: Sequence[int]) -> bool:
        constrained = self._constrained(message, output)
        return bool(constrained) and constrained is not None and constrained[-1] in EOS_IDS


def _without(mask: Masks, ids: Sequence[int]) -> Masks:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    bits[[token for token in ids if token < VOCAB]] = 0
    return np.packbits(bits, bitorder="little").view(np.int32).reshape(mask.shape)
