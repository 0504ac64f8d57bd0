"""Random schedules of the real scheduler on the real executor, with the mode flipped at will.

A schedule is a pure function of its seed: arrivals, prompts with shared prefixes, sampling, aborts,
page pressure, chunk sizes, overlap, and what decides the mode of every step. It knows nothing of what
the right answers are; ``toggle_reference`` does.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from helpers.scheduler_harness import Answer, decode

from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.managers.io_struct import (
    AbortRequest,
    ControlReply,
    GenerateRequest,
    SetStateRequest,
    TokenBatch,
)
from sglang.srt.managers.metrics import NullSink
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.prefix_cache import NoCache, PrefixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.executor import PendingStep
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import (
    ExecutorInfo,
    GraphSet,
    StepCost,
    StepDrafts,
    StepKind,
    StepMidInput,
    StepPlan,
    StepResult,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.controller import AutoController, CommittedStep
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.toggle import Decision, Policy, Reason, ToggleInput, decide_by_threshold

EOS_IDS = (2, 77)
VOCAB = 256
THRESHOLD, BY_ROWS = "speculative_disable_bs_threshold", "speculative_bs_schedule"
CHANGES: tuple[dict[str, Any], ...] = (
    *({THRESHOLD: value} for value in (0, 1, 2, 3, None, "auto", "auto", "auto")),
    *({BY_ROWS: value} for value in ("1:2,2-3:1,4-:2", "1-2:1,3-:0")),
)


@dataclass(frozen=True, slots=True)
class Arrival:
    at_turn: int
    message: GenerateRequest
    abort_at: int | None  # turn, or None


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything random about one run."""

    seed: int
    arrivals: tuple[Arrival, ...]
    config: SchedulerConfig
    num_pages: int  # usable by the scheduler
    use_cache: bool
    changes: tuple[dict[str, Any], ...]  # set in turn, one every few turns; empty: random modes
    mode_seed: int


def make_schedule(seed: int, page_size: int, most_pages: int) -> Schedule:
    """Every third seed is short of pages, so that requests are retracted."""
    rng = random.Random(seed)
    pressed = seed % 3 == 0
    prefixes = [[rng.randrange(3, VOCAB) for _ in range(rng.choice((5, 17, 40)))] for _ in range(2)]
    arrivals = tuple(_arrival(rng, f"r{i}", prefixes) for i in range(rng.randint(4 if pressed else 2, 5)))
    longest = max(len(a.message.input_ids) + (a.message.sampling.max_new_tokens or 0) for a in arrivals)
    # The longest request fits alone in plain mode; often nothing else does, nor do its drafts.
    least = -(-(longest + 2) // page_size) + 1
    config = SchedulerConfig(
        max_running_requests=6 if pressed else rng.choice((1, 3, 4, 6)),
        chunked_prefill_size=rng.choice((3, 8, 32, None)),
        enable_mixed_chunk=rng.random() < 0.3,
        disable_overlap=rng.random() < 0.3,
        decode_reserve_tokens=0 if pressed else rng.choice((0, 8, 64)),
        stream_interval=rng.choice((1, 1, 3)),
    )
    return Schedule(
        seed=seed,
        arrivals=arrivals,
        config=config,
        num_pages=min(most_pages, int(least * (1.0 if pressed else rng.choice((1.2, 1.6, 8.0))))),
        use_cache=rng.random() < 0.8,
        changes=tuple(rng.choice(CHANGES) for _ in range(8)) if rng.random() < 0.5 else (),
        mode_seed=rng.randrange(2**31),
    )


def _arrival(rng: random.Random, rid: str, prefixes: Sequence[list[int]]) -> Arrival:
    prompt = list(rng.choice(prefixes))[: rng.randint(1, 40)] if rng.random() < 0.7 else []
    prompt += [rng.randrange(3, VOCAB) for _ in range(rng.randint(0 if prompt else 1, 12))]
    message = GenerateRequest(rid, prompt, random_sampling(rng), rng.random() < 0.5, received_ts=0.0)
    abort_at = rng.randint(0, 15) if rng.random() < 0.15 else None
    return Arrival(rng.choice((0, 0, rng.randint(0, 25))), message, abort_at)


def random_sampling(rng: random.Random) -> SamplingParams:
    """Every parameter that the mode must not change the meaning of."""
    limit = rng.choice((rng.randint(1, 12), rng.randint(8, 32)))
    params = SamplingParams(
        max_new_tokens=limit,
        temperature=rng.choice((0.0, 0.0, 0.7, 1.0, 1.5)),
        sampling_seed=rng.randrange(2**63),
        ignore_eos=rng.random() < 0.5,
    )
    if rng.random() < 0.25:
        params = replace(
            params,
            top_k=rng.choice((-1, 1, 5, 40)),
            top_p=rng.choice((1.0, 0.9, 0.5)),
            min_p=rng.choice((0.0, 0.1)),
        )
    if rng.random() < 0.3:
        params = replace(
            params,
            frequency_penalty=rng.choice((0.0, 0.5, -1.0, 2.0)),
            presence_penalty=rng.choice((0.0, 0.7, 2.0)),
            repetition_penalty=rng.choice((1.0, 1.3, 0.8)),
        )
    if rng.random() < 0.2:
        stops = tuple("".join(rng.choice("abcdefgh") for _ in range(rng.randint(1, 3))) for _ in range(2))
        params = replace(params, stop=stops, no_stop_trim=rng.random() < 0.3)
    if rng.random() < 0.2:
        params = replace(params, stop_token_ids=tuple(rng.randrange(3, VOCAB) for _ in range(10)))
    if rng.random() < 0.2:
        params = replace(params, min_new_tokens=rng.randint(1, limit))
    if rng.random() < 0.15:
        params = replace(params, logit_bias=((rng.randrange(VOCAB), 3.0), (rng.randrange(VOCAB), -5.0)))
    if rng.random() < 0.2:
        params = replace(params, speculative_draft_len=rng.choice((0, 1, 2)))
    return params


class RestlessAuto(AutoController):
    """Is told random times of steps: it changes its mind all the time, and the same way every time. Where
    rows may have draft lengths of their own, these are random too.
    """

    def __init__(self, info: ExecutorInfo, seed: int) -> None:
        assert info.spec is not None
        costs = [StepCost(k, rows, 1.0, 0.0) for k in (0, *info.draft_lens) for rows in (1, 6)]
        costs += [StepCost(s.draft_len, s.rows, 1.0, 0.0, s.tokens) for s in info.ragged_sizes]
        slots = info.num_slots if info.ragged_sizes else 0
        super().__init__(
            CostTable.from_costs(costs, padded=False),
            info.spec.num_steps,
            probe_fraction=0.1,
            num_slots=slots,
        )
        self._rng = random.Random(seed)

    def decide(self, state: AutoInput) -> Decision:
        decision = super().decide(state)
        sizes = [s for s in state.ragged_sizes if s.draft_len in state.fitting_lens]
        if not (decision.reason is Reason.COST and sizes) or self._rng.random() < 0.3:
            return decision
        size, rows = self._rng.choice(sizes), state.num_decoding
        places = [row for row in range(rows) for _ in range(size.draft_len)]
        taken = self._rng.sample(places, min(len(places), size.tokens - size.rows))
        return Decision(size.draft_len, Reason.COST, size, tuple(taken.count(row) for row in range(rows)))

    def observe(self, step: CommittedStep) -> None:
        super().observe(replace(step, device_time_s=self._rng.choice((0.1, 1.0, 10.0))))


def ragged_sets(info: ExecutorInfo) -> tuple[GraphSet, ...]:
    """As if graphs of few rows had been captured whose rows have draft lengths of their own; not of trees."""
    if info.spec is None or info.spec.topk > 1:
        return info.graphs
    rows = sorted({2, 4, info.max_spec_rows})
    own = {k: tuple((n, n * (k + 2) // 2) for n in rows) for k in info.draft_lens}
    sets = [GraphSet(k, (info.max_spec_rows,), 0.0, 0, own[k]) for k in info.draft_lens]
    return (GraphSet(0, (info.num_slots,), 0.0, 0), *sets)


@dataclass(frozen=True, slots=True)
class _WithMasks:
    """A step whose masks must be as they were supplied until it is done: whoever makes them uses the memory
    again."""

    pending: PendingStep
    supplied: list[tuple[memoryview, bytes]]

    def drafts(self) -> StepDrafts:
        return self.pending.drafts()

    def wait(self) -> StepResult:
        result = self.pending.wait()
        assert all(masks == copy for masks, copy in self.supplied), "the memory was written too early"
        return result


class SmallerExecutor:
    """The same executor with fewer pages to give away, so that they run out."""

    def __init__(
        self, executor: InProcessExecutor, num_pages: int, num_slots: int, steps: Counter[str]
    ) -> None:
        self._executor = executor
        self._steps = steps
        self._info = replace(
            executor.info, num_pages=num_pages, num_slots=num_slots, graphs=ragged_sets(executor.info)
        )

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> PendingStep:
        if plan.kind is StepKind.DECODE:
            self._steps["spec" if plan.draft_len else "plain"] += 1
            self._steps["ragged"] += bool(plan.row_drafts)
            assert not (plan.masked and plan.row_drafts), "the host has a say after every draft"
        self._last = _WithMasks(self._executor.launch(plan), [])
        return self._last

    def supply(self, masks: StepMidInput) -> None:
        self._last.supplied.append((masks.masks, bytes(masks.masks)))
        self._executor.supply(masks)

    def shutdown(self) -> None:
        """It is shared with other schedules."""


@dataclass
class Outcome:
    answers: dict[str, Answer] = field(default_factory=dict)
    steps: Counter[str] = field(default_factory=Counter)  # decode steps by mode
    retractions: int = 0
    cached_tokens: int = 0


class ScheduleRun:
    """One schedule carried out; afterwards pages and slots are accounted for."""

    def __init__(
        self, executor: InProcessExecutor, schedule: Schedule, grammars: GrammarCompiler | None = None
    ) -> None:
        self._executor = executor
        self._schedule = schedule
        self.outcome = Outcome()
        self._poisoned: set[int] = set()
        info = executor.info
        self._cache: PrefixCache = RadixCache(info.page_size) if schedule.use_cache else NoCache()
        steps = self.outcome.steps
        smaller = SmallerExecutor(executor, schedule.num_pages, info.num_slots, steps)
        self.scheduler = Scheduler(
            executor=smaller,
            config=schedule.config,
            policy=self._policy(),
            cache=self._cache,
            decode=decode,
            eos_ids=EOS_IDS,
            emit=self._collect,
            reply=_expect_ok,
            metrics=NullSink(),
            clock=lambda: 0.0,
            auto=RestlessAuto(smaller.info, schedule.mode_seed),
            grammars=grammars,
        )

    def run(self, limit: int = 4000) -> Outcome:
        pending = list(self._schedule.arrivals)
        for turn in range(limit):
            for arrival in [a for a in pending if a.at_turn <= turn]:
                self.scheduler.receive(arrival.message)
                pending.remove(arrival)
            for arrival in self._schedule.arrivals:
                if arrival.abort_at == turn:
                    self.scheduler.receive(AbortRequest(arrival.message.rid))
            self._change_mode(turn)
            if self.scheduler.has_work:
                self.scheduler.step()
                self._poison_free_pages()
            elif not pending:
                self._check_end()
                return self.outcome
        raise AssertionError(f"schedule {self._schedule.seed} does not come to an end")

    def _policy(self) -> Policy:
        if self._schedule.changes:
            return decide_by_threshold
        rng = random.Random(self._schedule.mode_seed)

        def flip(state: ToggleInput) -> Decision:
            wanted = rng.choice((0, 0, state.num_steps, state.num_steps, rng.randint(1, state.num_steps)))
            return Decision(wanted if state.spec_fits else 0, Reason.MANUAL)

        return flip

    def _change_mode(self, turn: int) -> None:
        changes = self._schedule.changes
        if changes and turn % 5 == 0:
            self.scheduler.receive(SetStateRequest("t", changes[turn // 5 % len(changes)]))

    def _poison_free_pages(self) -> None:
        """Whoever reads a page that was given back gets NaN."""
        free = set(self.scheduler.pages.free_pages())
        fresh = sorted(free - self._poisoned)
        self._poisoned = free
        if fresh:
            for pool in self._executor.worker.pools:
                pool.poison(fresh)

    def _collect(self, batch: TokenBatch) -> None:
        for output in batch.outputs:
            answer = self.outcome.answers.setdefault(output.rid, Answer())
            assert answer.finish is None, f"{output.rid} was answered after its end"
            answer.ids += output.new_ids
            answer.reports += [] if output.report is None else [output.report]
            answer.finish, answer.stop_trim, answer.stats = output.finish, output.stop_trim, output.stats
            if output.finish is not None:
                self.outcome.retractions += output.stats.num_retractions
                self.outcome.cached_tokens += output.stats.cached_tokens

    def _check_end(self) -> None:
        pages, cache = self.scheduler.pages, self._cache
        cache.check_integrity()
        assert pages.num_free + cache.num_pages == self._schedule.num_pages, "a page is lost"
        assert self.scheduler.slots.num_free == self._executor.info.num_slots, "a slot is lost"
        assert set(self.outcome.answers) == {a.message.rid for a in self._schedule.arrivals}
        assert all(a.finish is not None for a in self.outcome.answers.values()), "a request was not answered"


def _expect_ok(reply: ControlReply) -> None:
    assert reply.ok, reply.error
