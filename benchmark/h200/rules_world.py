"""Requests of every kind of rule about what may come, over a small random model (``rules_correctness``).

Ids below 256 are bytes, the others words of a few letters; their number is no multiple of 32, nor of a
kernel's block. Rules are made of what the model says without them, so that they have something to do.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import torch
from helpers.processors import Broken, Fickle

from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import CompiledGrammar, GrammarBackend, GrammarSpec, JsonOptions, spec_of
from sglang.srt.constrained.vocabulary import Vocabulary
from sglang.srt.managers.io_struct import GenerateRequest, RequestWish
from sglang.srt.sampling.custom_logit_processor import (
    REQUEST,
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
    ThinkingBudgetLogitProcessor,
)
from sglang.srt.sampling.sampling_params import ChoiceRules, ReasoningEnd, SamplingParams, ThinkingLimit

EOS: Final = 2
SEED: Final = 5
HEATS: Final = {"greedy": 0.0, "seeded": 1.2}
THINKING_BEGIN, THINKING_END, NEW_LINE = 60, 62, 10
END, END_IDS = "ek", (101, 107)
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 9999},
        "b": {"enum": ["x", "yy"]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
TAG: Final = {
    "type": "structural_tag",
    "triggers": ["k"],
    "structures": [{"begin": "kk", "schema": {"type": "integer"}, "end": ";"}],
}
REGEX: Final = "(ab|ba|[c-z]{2}){1,20}0?"
EBNF: Final = 'root ::= "(" root ")" | "[" root root "]" | "x"'


class Budget(ThinkingBudgetLogitProcessor):
    THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = THINKING_BEGIN, THINKING_END, NEW_LINE


class Tilted(CustomLogitProcessor):
    """Changes every number, and one by how long the reply is."""

    def __call__(
        self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None
    ) -> torch.Tensor:
        made = logits * 0.5
        for row, params in zip(made, custom_param_list or (), strict=True):
            row[len(params[REQUEST].output_ids) * 7 % logits.shape[1]] += params["more"]
        return made


@dataclass(frozen=True)
class World:
    tokens: tuple[bytes, ...]
    prompt_len: int
    output_len: int

    @staticmethod
    def of(size: int, prompt_len: int, output_len: int) -> World:
        rng, texts = random.Random(1), dict.fromkeys(bytes([byte]) for byte in range(256))
        while len(texts) < size:
            letters = "abcdefghijklmnopqrstuvwxyz 0123456789"
            texts.setdefault("".join(rng.choices(letters, k=rng.randint(2, 4))).encode())
        return World(tuple(texts), prompt_len, output_len)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.tokens, frozenset(), (EOS,))

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(self.tokens[token] for token in ids).decode("latin-1")

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        rng = random.Random(seed)
        ids = [rng.randrange(97, len(self.tokens)) for _ in range(length)]
        ids[-min(3, length)] = THINKING_BEGIN
        return ids


@dataclass(frozen=True, slots=True)
class Part:
    """A request beside its prompt, seed and temperature."""

    params: Mapping[str, Any] = field(default_factory=dict)
    rules: ChoiceRules | None = None
    processor: str | None = None
    wish: RequestWish | None = None
    end: ReasoningEnd | None = None


def on_device(ids: Sequence[int]) -> dict[str, Part]:
    """Nothing of the host. ``ids``: what comes without rules."""
    logprobs = RequestWish(True, 3, 5, (7, 70))
    return {
        "bare": Part(),
        "frequency": Part({"frequency_penalty": 1.5}),
        "presence": Part({"presence_penalty": 1.8}),
        "repetition": Part({"repetition_penalty": 1.6}),
        "penalties": Part(
            {"frequency_penalty": 0.7, "presence_penalty": -1.0, "repetition_penalty": 1.2,
             "logit_bias": ((ids[1], -2.0), (300, 3.0))}
        ),
        "logit_bias": Part({"logit_bias": tuple(sorted({ids[2]: -100.0, ids[4]: 4.0}.items()))}),
        "min_p": Part({"min_p": 0.2}),
        "filters": Part({"top_k": 40, "top_p": 0.6, "min_p": 0.01}),
        "min_new_tokens": Part({"min_new_tokens": 10, "stop_token_ids": tuple(sorted({ids[3], ids[5]}))}),
        "bad word": Part(rules=ChoiceRules(((ids[2],),))),
        "one draft": Part({"speculative_draft_len": 1}),
        "no drafts": Part({"speculative_draft_len": 0}),
        "logprobs": Part({"presence_penalty": 1.5}, wish=logprobs),
        "hidden": Part(wish=RequestWish(hidden_states="all")),
    }  # fmt: skip


def with_masks(ids: Sequence[int]) -> dict[str, Part]:
    thinking = ThinkingLimit(5, ReasoningEnd(END, None), END_IDS)
    begun = ThinkingLimit(3, ReasoningEnd(END, ids[0]), END_IDS)
    form = {"ignore_eos": False}
    json_form = form | {"json_schema": json.dumps(SCHEMA)}
    return {
        "bare": Part(),
        "bad words": Part(rules=ChoiceRules((tuple(ids[1:3]), tuple(ids[4:7])))),
        "thinking": Part(rules=ChoiceRules(thinking=thinking)),
        "thinking begun": Part(rules=ChoiceRules((tuple(ids[8:10]),), begun)),
        "json": Part(json_form),
        "json, told": Part(
            json_form | {"presence_penalty": 1.0, "logit_bias": ((49, 2.0),)},
            wish=RequestWish(True, -1, 3, (49, 50)),
        ),
        "regex": Part(form | {"regex": REGEX}),
        "regex, min_new": Part(form | {"regex": REGEX, "min_new_tokens": 8, "logit_bias": ((EOS, 30.0),)}),
        "ebnf": Part(form | {"ebnf": EBNF, "logit_bias": ((120, 1.0),)}),
        "tag": Part(form | {"structural_tag": json.dumps(TAG), "logit_bias": ((107, 9.0),)}),
        "thinking, regex": Part(
            form | {"regex": "[0-9]{3,9}"}, ChoiceRules(thinking=thinking), end=ReasoningEnd(END, None)
        ),
    }


def with_processors(ids: Sequence[int]) -> dict[str, Part]:
    disallowed = DisallowedTokensLogitsProcessor.to_str()
    banned = _custom(token_ids=sorted({ids[2], ids[5]}))
    return {
        "bare": Part(),
        "disallowed": Part(banned, processor=disallowed),
        "disallowed, told": Part(
            banned | {"repetition_penalty": 1.3}, processor=disallowed, wish=RequestWish(True, -1, 2, (9,))
        ),
        "budget": Part(_custom(thinking_budget=8), processor=Budget.to_str()),
        "fickle": Part(_custom(modulus=3), processor=Fickle.to_str()),
        "tilted": Part(_custom(more=4.0), processor=Tilted.to_str()),
        "broken": Part(processor=Broken.to_str()),
        "json, disallowed": Part(
            banned | {"ignore_eos": False, "json_schema": json.dumps(SCHEMA)}, processor=disallowed
        ),
        "bad words": Part(rules=ChoiceRules((tuple(ids[1:3]), tuple(ids[4:7])))),
    }


def _custom(**params: Any) -> dict[str, Any]:
    return {"custom_params": json.dumps(params)}


BATCHES: Final = {"device": on_device, "masks": with_masks, "processors": with_processors}
FREE: Final = {
    "free, short": 5,
    "free, long": 150,
    "free": 61,
}  # rows beside them, and their prompts' lengths


def requests_of(world: World, batch: str, bare: Mapping[str, Sequence[int]]) -> list[GenerateRequest]:
    """``bare``: what comes without rules, of each of HEATS."""
    made = [
        _request(world, f"{name}/{choice}", world.prompt(world.prompt_len), heat, part)
        for choice, heat in HEATS.items()
        for name, part in BATCHES[batch](bare[choice]).items()
    ]
    free = [
        _request(world, name, world.prompt(length, at + 1), HEATS["seeded"], Part())
        for at, (name, length) in enumerate(FREE.items())
    ]
    return [free[0], *made[::2], free[1], *made[1::2], free[2]]


def bare_requests(world: World) -> list[GenerateRequest]:
    prompt = world.prompt(world.prompt_len)
    return [_request(world, choice, prompt, heat, Part()) for choice, heat in HEATS.items()]


def _request(world: World, rid: str, prompt: list[int], heat: float, part: Part) -> GenerateRequest:
    params = SamplingParams(
        max_new_tokens=world.output_len, temperature=heat, sampling_seed=SEED, ignore_eos=True
    )
    return GenerateRequest(
        rid, prompt, replace(params, **part.params), stream=False, received_ts=0.0, reasoning_end=part.end,
        rules=part.rules, processor=part.processor, wish=part.wish,
    )  # fmt: skip


# ---- grammars


def missing(package: str) -> str | None:
    """Why it can't be used."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        return f"{package} ({error})"
    return None


def compiler(world: World, backend: str) -> GrammarCompiler:
    def make() -> tuple[GrammarBackend, Vocabulary]:
        options = JsonOptions(any_whitespace=False)
        if backend == "llguidance":
            from sglang.srt.constrained.llguidance_backend import LLGuidanceBackend

            return LLGuidanceBackend(world.vocabulary, options), world.vocabulary
        from sglang.srt.constrained.xgrammar_backend import XGrammarBackend

        return XGrammarBackend(world.vocabulary, options), world.vocabulary

    return GrammarCompiler(make)


def compiled(grammars: GrammarCompiler, spec: GrammarSpec) -> CompiledGrammar:
    compilation, deadline = grammars.compilation(spec), time.monotonic() + 60
    while not compilation.is_done and time.monotonic() < deadline:
        grammars.wait(0.05)
        grammars.poll()
    assert compilation.compiled is not None, compilation.error
    return compilation.compiled


def compile_all(grammars: GrammarCompiler, messages: Sequence[GenerateRequest]) -> None:
    """So that no row waits for it."""
    for message in messages:
        spec = spec_of(message.sampling)
        if spec is not None:
            compiled(grammars, spec)
