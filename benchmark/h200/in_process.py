"""The scheduler over an executor in this process, without HTTP: every step that it makes is recorded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
from sglang.srt.model_executor.executor import Executor, PendingStep
from sglang.srt.model_executor.step_plan import (
    ExecutorInfo,
    PrefillChunk,
    StepDrafts,
    StepMidInput,
    StepPlan,
    StepResult,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.controller import AutoController, CommittedStep
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.toggle import Reason, decide_by_threshold

THRESHOLD = "speculative_disable_bs_threshold"
SCHEDULE = "speculative_bs_schedule"
NO_CHUNKS = 10**9  # tokens of a prefill step: any prompts at once


@dataclass(frozen=True, slots=True)
class Clock:
    now: Callable[[], float] = time.perf_counter
    sleep: Callable[[float], None] = time.sleep


REAL_TIME = Clock()


@dataclass(frozen=True, slots=True)
class Mode:
    """How the draft length of a step is found."""

    name: str
    threshold: int | str | None  # as in POST /set_internal_state
    schedule: str | None = None  # instead of it

    @property
    def settings(self) -> dict[str, Any]:
        return {THRESHOLD: self.threshold} if self.schedule is None else {SCHEDULE: self.schedule}


def fixed_modes(num_steps: int) -> list[Mode]:
    """Plain, and every number of drafts; the last one is called "always"."""
    shorter = [Mode(f"k={k}", None, f"1-:{k}") for k in range(1, num_steps)]
    return [Mode("plain", 0), *shorter, Mode("always", None)]


class OwnSteps(AutoController):
    """``auto`` that learns from the steps it decided, and not from those of the modes beside it."""

    def observe(self, step: CommittedStep) -> None:
        if step.decision.reason in (Reason.COST, Reason.PROBE):
            super().observe(step)


def own_steps(info: ExecutorInfo) -> OwnSteps | None:
    if info.spec is None or not info.costs:
        return None
    table = CostTable.from_costs(info.costs, padded=bool(info.graphs))
    return OwnSteps(table, info.spec.num_steps, num_slots=info.num_slots if info.ragged_sizes else 0)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step as it was launched and came back. Moments are those of the executor's clock."""

    label: str  # of the segment in which it was launched
    kind: str
    draft_len: int
    num_rows: int  # that decode
    kv_tokens: int  # at most so many places are read, all rows together
    accepted: tuple[int, ...]  # decode rows by drafts that were taken: 0, 1, …
    num_first: int  # first tokens, of prompts
    launched_s: float
    gap_s: float  # from the end of the step before (or its launch, where nothing ran) to its own
    done_s: float
    device_s: float
    used_graph: bool | None
    num_drafts: int = 0  # that all rows verify

    @property
    def num_tokens(self) -> int:
        return self.num_first + sum(n * (taken + 1) for taken, n in enumerate(self.accepted))


class RecordingExecutor:
    """An executor whose steps are noted down; with ``skips_prefill`` prompts cost one row each.

    Then only a prompt's last token is run: the pages before it count as filled, and hold what lay there.
    So a batch of any context begins at once, and its rows read pages of their own as always.
    """

    def __init__(self, executor: Executor, clock: Clock = REAL_TIME) -> None:
        self._executor = executor
        self._clock = clock
        self.label = ""
        self.skips_prefill = False
        self.records: list[StepRecord] = []
        self._last_done_s = 0.0

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def launch(self, plan: StepPlan) -> PendingStep:
        if self.skips_prefill:
            plan = without_prefill(plan)
        launched = self._clock.now()
        return _Recorded(self, plan, self._executor.launch(plan), self.label, launched)

    def supply(self, masks: StepMidInput) -> None:
        self._executor.supply(masks)

    def shutdown(self) -> None:
        self._executor.shutdown()

    def note(self, plan: StepPlan, result: StepResult, label: str, launched_s: float) -> None:
        done, num_rows = self._clock.now(), len(plan.decode_slots)
        accepted = [0] * (plan.draft_len + 1)
        assert not any(result.faults), "logits that are not finite: times mean nothing"
        for tokens in result.tokens[:num_rows]:
            accepted[len(tokens) - 1] += 1
        self.records.append(
            StepRecord(
                label=label,
                kind=str(plan.kind),
                draft_len=plan.draft_len,
                num_rows=num_rows,
                kv_tokens=sum(plan.decode_len_bounds),
                accepted=tuple(accepted) if num_rows else (),
                num_first=sum(len(tokens) for tokens in result.tokens[num_rows:]),
                launched_s=launched_s,
                gap_s=done - max(self._last_done_s, launched_s),
                done_s=done,
                device_s=result.device_time_s,
                used_graph=result.used_graph,
                num_drafts=sum(plan.drafts_of_rows),
            )
        )
        self._last_done_s = done


@dataclass(frozen=True, slots=True)
class _Recorded:
    executor: RecordingExecutor
    plan: StepPlan
    pending: PendingStep
    label: str
    launched_s: float

    def drafts(self) -> StepDrafts:
        return self.pending.drafts()

    def wait(self) -> StepResult:
        result = self.pending.wait()
        self.executor.note(self.plan, result, self.label, self.launched_s)
        return result


def without_prefill(plan: StepPlan) -> StepPlan:
    """The same plan, all tokens of its prompts but the last taken for cached."""
    if not plan.prefill:
        return plan
    assert all(chunk.is_last for chunk in plan.prefill), "prompts are not chunked where prefill is skipped"
    ends = {chunk.slot: chunk.start + len(chunk.token_ids) for chunk in plan.prefill}
    return replace(
        plan,
        prefill=tuple(PrefillChunk(c.slot, ends[c.slot] - 1, c.token_ids[-1:], None) for c in plan.prefill),
        admissions=tuple(replace(a, cached_len=ends[a.slot] - 1) for a in plan.admissions),
    )


def whole_prompts(info: ExecutorInfo) -> SchedulerConfig:
    return SchedulerConfig(
        max_running_requests=info.num_slots, chunked_prefill_size=-1, max_prefill_tokens=NO_CHUNKS
    )


class InProcess:
    """One scheduler; several may use one executor, one after the other."""

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig | None = None,  # None: every row there is, prompts whole
        cache: PrefixCache | None = None,
        clock: Clock = REAL_TIME,
        auto: AutoController | None = None,  # None: one that learns from its own steps
    ) -> None:
        info = executor.info
        self.executor = RecordingExecutor(executor, clock)
        self.clock = clock
        self.finished: list[str] = []  # names; whoever reads them takes them away
        self._replies: list[ControlReply] = []
        self._num_sent = 0
        self.scheduler = Scheduler(
            executor=self.executor,
            config=config or whole_prompts(info),
            policy=decide_by_threshold,
            cache=cache or NoCache(),
            decode=lambda ids: "",  # no request has stop strings
            eos_ids=(),
            emit=self._emitted,
            reply=self._replies.append,
            metrics=NullSink(),
            clock=time.time,
            auto=auto or own_steps(info),
        )

    @property
    def records(self) -> list[StepRecord]:
        return self.executor.records

    def set_mode(self, mode: Mode) -> None:
        """From the next step planned on."""
        self.scheduler.receive(SetStateRequest("mode", mode.settings))
        reply = self._replies.pop()
        assert reply.ok, f"mode {mode.name}: {reply.error}"

    def submit(self, prompt: Sequence[int], output_len: int) -> str:
        self._num_sent += 1
        rid = f"r{self._num_sent}"
        sampling = SamplingParams(
            max_new_tokens=output_len, temperature=0.0, ignore_eos=True, sampling_seed=1
        )
        self.scheduler.receive(GenerateRequest(rid, list(prompt), sampling, stream=True, received_ts=0.0))
        return rid

    def begin(self, prompts: Sequence[Sequence[int]], output_len: int, skip_prefill: bool) -> list[str]:
        """Admit these, and prefill; decode steps of all rows follow. Returns their names."""
        assert not self.scheduler.has_work, "the batch before has not ended"
        self.executor.skips_prefill, self.executor.label = skip_prefill, "prefill"
        names = [self.submit(prompt, output_len) for prompt in prompts]
        self.scheduler.step()
        while self.scheduler.table.waiting or self.scheduler.table.prefilling:
            assert self.scheduler.step(), "the prompts do not fit"
        self.executor.skips_prefill = False
        return names

    def end(self) -> None:
        """Abort what runs; nothing is in flight afterwards."""
        self.scheduler.receive(AbortRequest("", abort_all=True))
        self.scheduler.drain()

    def step(self) -> bool:
        return self.scheduler.step()

    def _emitted(self, batch: TokenBatch) -> None:
        for output in batch.outputs:
            if output.finish is not None:
                assert output.finish.type in ("length", "abort"), f"{output.rid}: {output.finish}"
                self.finished.append(output.rid)
