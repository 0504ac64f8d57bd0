"""What every id of a text was chosen from, in plain PyTorch on a CPU: rules told from all the text before it.

No step, no slot and no kernel takes part: a matcher walks along the text from its beginning, and counts are
counted anew. Noise is the function of seed, place and id that ``gumbel`` defines.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch

from benchmark.h200.reference_ids import TeacherForced
from benchmark.h200.rules_world import EOS, REGEX, World, compiled
from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import GrammarKind, Matcher, spec_of
from sglang.srt.managers.io_struct import GenerateRequest, TokenReport
from sglang.srt.sampling.custom_logit_processor import REQUEST, load_processor
from sglang.srt.sampling.gumbel import noise
from sglang.srt.sampling.logit_edits import ProcessedRequest
from sglang.srt.sampling.sampling_params import LARGEST_NUMBER, SamplingParams, ThinkingLimit

BROKEN: Final = 1e20  # no rounding is that large: what was chosen is forbidden


@dataclass(frozen=True, slots=True)
class Judged:
    short: list[float]  # at each place: how far the chosen id's score is below the best, or below a filter's
    logprobs: list[torch.Tensor]  # [V] at each place, of what is chosen from, filters left out
    text_ok: bool  # the grammar goes on with all of it, and a whole text has its form

    @property
    def worst(self) -> float:
        return max(self.short, default=0.0)


@dataclass
class Reference:
    world: World
    target: Path
    grammars: GrammarCompiler | None
    max_len: int
    _judged: dict[tuple[str, tuple[int, ...]], Judged] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._model = TeacherForced(self.target, torch.float32, self.max_len)

    def judge(self, message: GenerateRequest, ids: Sequence[int]) -> Judged:
        key = message.rid + repr(message.sampling), tuple(ids)
        if key not in self._judged:
            self._judged[key] = self._judge(message, list(ids))
        return self._judged[key]

    def _judge(self, message: GenerateRequest, ids: list[int]) -> Judged:
        if not ids:
            return Judged([], [], True)
        text, params = _Text(self, message), message.sampling
        raw = self._model.logits([*message.input_ids, *ids], len(ids))  # [T, V]
        short, logprobs = [], []
        for place, token in enumerate(ids):
            logits = text.logits(raw[place].clone(), ids[:place])
            warm = logits if params.greedy else logits / params.temperature
            logprobs.append(warm.log_softmax(-1))
            short.append(self._short(message, warm, place, token))
            text.take(token)
        return Judged(short, logprobs, text.is_fine)

    def _short(self, message: GenerateRequest, warm: torch.Tensor, place: int, token: int) -> float:
        """warm: [V]"""
        params = message.sampling
        if params.greedy:
            return float(warm.max() - warm[token])
        cutoff = _cutoff(warm, params)
        seed, index = torch.tensor([params.sampling_seed]), torch.tensor([len(message.input_ids) + place])
        drawn = warm + noise(seed, index, torch.arange(len(warm)))[0]
        best = drawn[warm >= cutoff].max()
        return max(float(best - drawn[token]), float(cutoff - warm[token]))


class _Text:
    """One reply as it grows."""

    def __init__(self, reference: Reference, message: GenerateRequest) -> None:
        self._world, self._message = reference.world, message
        self._spec = spec_of(message.sampling)
        self._matcher: Matcher | None = None
        if self._spec is not None:
            assert reference.grammars is not None
            self._matcher = compiled(reference.grammars, self._spec).matcher()
        self._ids: list[int] = []
        self._in_grammar: list[int] = []
        self._is_open = message.reasoning_end is not None
        self.is_fine = True

    def take(self, token: int) -> None:
        self._ids.append(token)
        if self._is_open:
            end = self._message.reasoning_end
            assert end is not None and end.begin_id is None
            self._is_open = end.text not in self._world.decode(self._ids)
        elif self._matcher is not None:
            self._in_grammar.append(token)
            taken = self._matcher.accept(token)
            self.is_fine &= taken and (token != EOS or self._has_form())

    def logits(self, raw: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """[V] raw logits -> those of the next choice."""
        raw = self._processed(raw, ids)
        return raw.masked_fill(~self._allowed(raw, ids), -torch.inf)

    def _processed(self, raw: torch.Tensor, ids: list[int]) -> torch.Tensor:
        message, params = self._message, self._message.sampling
        if message.processor is not None:
            request = ProcessedRequest(message.rid, list(message.input_ids), ids)
            given = json.loads(params.custom_params or "{}") | {REQUEST: request}
            raw = load_processor(message.processor)(raw[None].clone(), [given])[0]
        counts = torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=len(raw))
        raw = raw - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
        scale = torch.where(counts > 0, params.repetition_penalty, 1.0)
        raw = torch.where(raw < 0, raw * scale, raw / scale)
        for token, bias in params.logit_bias:
            raw[token] += bias
        return raw

    def _allowed(self, raw: torch.Tensor, ids: list[int]) -> torch.Tensor:
        """[V] bool. A rule that would leave nothing has no say."""
        params, rules = self._message.sampling, self._message.rules
        allowed = torch.ones(len(raw), dtype=torch.bool)
        if self._matcher is not None and not self._is_open and not self._matcher.is_terminated:
            masks = np.full((1, -(-len(raw) // 32)), -1, np.int32)
            self._matcher.fill(masks, 0)
            bits = np.unpackbits(masks.view(np.uint8), bitorder="little")
            allowed = torch.from_numpy(bits[: len(raw)].astype(bool))
        forbidden: list[int] = []
        if rules is not None and rules.thinking is not None:
            forced = _forced(self._world, rules.thinking, ids)
            if forced is not None and bool(allowed[forced]):
                allowed = torch.zeros_like(allowed)
                allowed[forced] = True
        for word in rules.bad_words if rules is not None else ():
            if len(word) - 1 <= len(ids) and tuple(ids[len(ids) - len(word) + 1 :]) == word[:-1]:
                forbidden.append(word[-1])
        allowed = _without(allowed, forbidden)
        if len(ids) < params.min_new_tokens:
            stops = params.stop_token_ids if params.ignore_eos else (EOS, *params.stop_token_ids)
            allowed = _without(allowed, stops)
        return allowed

    def _has_form(self) -> bool:
        """Of a whole text, by other means than the grammar's library."""
        assert self._spec is not None
        text = self._world.decode(self._in_grammar[:-1])
        if self._spec.kind is GrammarKind.JSON:
            found = json.loads(text)
            return list(found) == ["a", "b", "c"] and 0 <= found["a"] <= 9999 and found["b"] in ("x", "yy")
        if self._spec.kind is GrammarKind.REGEX:
            pattern = REGEX if self._spec.text == REGEX else "[0-9]{3,9}"
            return re.fullmatch(pattern, text) is not None
        return True


def _without(allowed: torch.Tensor, ids: Sequence[int]) -> torch.Tensor:
    kept = allowed.clone()
    kept[list(ids)] = False
    return kept if bool(kept.any()) else allowed


def _forced(world: World, limit: ThinkingLimit, ids: list[int]) -> int | None:
    begin_id = limit.end.begin_id
    if begin_id is not None and ids[:1] != [begin_id]:
        return None
    thought, end = ids if begin_id is None else ids[1:], list(limit.end_ids)
    if limit.end.text in world.decode(thought) or len(thought) < limit.budget:
        return None
    begun = max(n for n in range(len(end)) if n == 0 or thought[-n:] == end[:n])
    return end[begun]


def _cutoff(warm: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The lowest score that top-k, top-p and min-p let stay. warm: [V]"""
    ordered = warm.sort(descending=True).values
    probs = ordered.double().softmax(-1)
    keep = torch.arange(len(warm)) < (params.top_k if params.top_k > 0 else len(warm))
    if params.top_p < 1:
        keep &= probs.cumsum(0) - probs <= params.top_p
    keep &= probs >= params.min_p * probs[0]
    return ordered[keep][-1]


def told_error(judged: Judged, message: GenerateRequest, ids: Sequence[int], report: TokenReport) -> float:
    """The largest difference of a logprob that was told of the reply. Infinity: one is missing, or is that of
    an id which can't be chosen, and ours is not.
    """
    wish, worst = message.wish, 0.0
    assert wish is not None
    if len(report.chosen.own) != len(ids):
        return torch.inf
    for place, token in enumerate(ids):
        exact = judged.logprobs[place]
        best = exact.topk(wish.num_top).values
        pairs = [
            (report.chosen.own[place], exact[token]),
            *zip(report.chosen.top[place], best, strict=True),
            *zip(report.chosen.named[place], exact[list(wish.token_ids or ())], strict=True),
        ]
        for mine, theirs in pairs:
            is_possible = bool(theirs > -LARGEST_NUMBER / 10)
            if is_possible != (mine > -LARGEST_NUMBER / 10):
                return torch.inf
            worst = max(worst, abs(mine - float(theirs)) if is_possible else 0.0)
    return worst
