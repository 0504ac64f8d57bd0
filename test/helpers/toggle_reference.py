"""What a request must answer: plain decode of it alone, in one slot, with no cache and no drafter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.scheduler_harness import Answer, decode
from helpers.toggle_schedule import EOS_IDS

from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import SlotSampling
from sglang.srt.sampling.rows import Choice, ChoiceMasks, ChoiceRows
from sglang.srt.sampling.sampling_params import SamplingParams

TIE = 1e-4


@dataclass
class Tally:
    """Counts to print at the end of a test."""

    schedules: int = 0
    requests: int = 0
    tokens: int = 0
    aborted: int = 0
    exemptions: int = 0
    plain_steps: int = 0
    spec_steps: int = 0
    ragged_steps: int = 0  # of these, with draft lengths of the rows' own
    retractions: int = 0
    cached_tokens: int = 0

    def line(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in vars(self).items())


class Reference:
    """Plain decode alone. With ``allow_ties`` (float32) a difference at a tie is followed, and counted."""

    def __init__(self, executor: InProcessExecutor, allow_ties: bool) -> None:
        self._executor = executor
        self._driver = PlanDriver(executor)
        self._allow_ties = allow_ties
        self._scores = _record_scores(executor)

    def check(self, message: GenerateRequest, answer: Answer, tally: Tally) -> None:
        """The answer is what plain decode alone gives (the beginning of it, if it was aborted)."""
        assert answer.finish is not None
        tally.requests += 1
        tally.tokens += len(answer.ids)
        aborted = answer.finish.type == "abort"
        tally.aborted += aborted
        expected = self._follow(message, answer.ids, tally)
        kept, kind = end_of(message.sampling, expected)
        if aborted:
            assert answer.ids == expected[: len(answer.ids)] and len(answer.ids) <= kept
            return
        assert answer.ids == expected[:kept], f"{message.rid}: {answer.ids} instead of {expected[:kept]}"
        assert answer.finish.type == kind, f"{message.rid}: {answer.finish} instead of {kind}"

    def _follow(self, message: GenerateRequest, given: list[int], tally: Tally) -> list[int]:
        """The reference's ids; at a tie it goes on from the id that was given."""
        ids = self._generate(message, [])
        while self._allow_ties:
            differing = [i for i, (a, b) in enumerate(zip(ids, given, strict=False)) if a != b]
            if not differing or not self._is_tie(message, given[: differing[0]]):
                break
            tally.exemptions += 1
            ids = self._generate(message, given[: differing[0] + 1])
        return ids

    def _generate(self, message: GenerateRequest, outputs: Sequence[int]) -> list[int]:
        """All ids up to the length limit, stops ignored, going on from ``outputs``."""
        limit = message.sampling.max_new_tokens
        assert limit is not None
        if len(outputs) >= limit:
            return list(outputs)
        request = self._prefill(message, outputs)
        self._driver.generate([request], limit)
        self._driver.release(request)
        return request.output

    def _prefill(self, message: GenerateRequest, outputs: Sequence[int]) -> DrivenRequest:
        driver = self._driver
        request = DrivenRequest(
            driver.free_slots.pop(), list(message.input_ids), slot_sampling(message.sampling), list(outputs)
        )
        for plan in driver.prefill_plans(request):
            driver.run(plan, [request])
        return request

    def _is_tie(self, message: GenerateRequest, outputs: list[int]) -> bool:
        self._driver.release(self._prefill(message, outputs))
        best = self._scores[-1].flatten().topk(2).values
        return float(best[0] - best[1]) <= TIE


def _record_scores(executor: InProcessExecutor) -> list[torch.Tensor]:
    """The perturbed scores of the last choice, of one row: the sampler has put its rules into the logits."""
    sampler, seen = executor.worker.sampler, []
    choose = sampler.choose

    def recording(logits: torch.Tensor, rows: ChoiceRows, masks: ChoiceMasks | None = None) -> Choice:
        choice = choose(logits, rows, masks)
        nodes, states = logits.view(*rows.tokens.shape, -1), sampler.states
        seen[:] = [states.scores(nodes, rows) if states.is_sampled(rows.slots_cpu[0]) else nodes.clone()]
        return choice

    sampler.choose = recording  # type: ignore[method-assign]
    return seen


def slot_sampling(params: SamplingParams) -> SlotSampling:
    """The rules told a second time, apart from the scheduler's."""
    stops = params.stop_token_ids if params.ignore_eos else (*EOS_IDS, *params.stop_token_ids)
    return SlotSampling(
        temperature=0.0 if params.temperature < 1e-6 or params.top_k == 1 else params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        min_new_tokens=params.min_new_tokens,
        suppressed_ids=tuple(stops) if params.min_new_tokens else (),
        logit_bias=params.logit_bias,
        seed=params.sampling_seed or 0,
    )


def end_of(params: SamplingParams, ids: Sequence[int]) -> tuple[int, str]:
    """How many of the ids an answer has, and why it ends there."""
    stops = params.stop_token_ids if params.ignore_eos else (*EOS_IDS, *params.stop_token_ids)
    limit = params.max_new_tokens or len(ids)
    for count in range(1, len(ids) + 1):
        if count >= limit:
            return count, "length"
        if ids[count - 1] in stops and count > params.min_new_tokens:
            return count, "stop"
        before, after = decode(ids[: count - 1]), decode(ids[:count])
        fresh = any(after.find(s, max(0, len(before) - len(s) + 1)) >= 0 for s in params.stop)
        fresh = fresh or any(_matches(p, after) - _matches(p, before) for p in params.stop_regex)
        if fresh and count >= params.min_new_tokens:
            return count, "stop"
    return len(ids), "unfinished"


def _matches(pattern: str, text: str) -> set[tuple[int, int]]:
    text = text.rstrip("\ufffd")
    found = [re.compile(pattern).match(text, start) for start in range(len(text) + 1)]
    return {match.span() for match in found if match is not None}
