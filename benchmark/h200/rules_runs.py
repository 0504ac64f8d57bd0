"""Batches of requests with rules through the real scheduler, with every decode step and every wait noted."""

from __future__ import annotations

import time
import traceback
import warnings
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

import torch

from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.managers.io_struct import (
    ControlReply,
    FinishReason,
    GenerateRequest,
    RequestStats,
    TokenBatch,
    TokenReport,
)
from sglang.srt.managers.metrics import NullSink
from sglang.srt.managers.reports import joined
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.prefix_cache import NoCache
from sglang.srt.model_executor.executor import Executor, PendingStep
from sglang.srt.model_executor.step_plan import (
    ExecutorInfo,
    StepDrafts,
    StepKind,
    StepMidInput,
    StepPlan,
    StepResult,
)
from sglang.srt.speculative.toggle import Decision, Policy, Reason, ToggleInput

MOST_TURNS: Final = 5000
CHUNK: Final = 64  # so that long prompts come in several, beside rows that decode


def plainly(state: ToggleInput) -> Decision:
    return Decision(0, Reason.MANUAL)


def speculatively(state: ToggleInput) -> Decision:
    return Decision(state.num_steps if state.spec_fits else 0, Reason.MANUAL)


def switching() -> Policy:
    """In every step."""
    turns = count()
    return lambda state: (speculatively, plainly)[next(turns) % 2](state)


MODES: Final[dict[str, Callable[[], Policy]]] = {
    "plain": lambda: plainly,
    "spec": lambda: speculatively,
    "switching": switching,
}


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stats: RequestStats | None = None
    reports: list[TokenReport] = field(default_factory=list)

    @property
    def report(self) -> TokenReport:
        parts = self.reports
        hidden = tuple(vectors for part in parts for vectors in part.hidden)
        return TokenReport(joined([p.prompt for p in parts]), joined([p.chosen for p in parts]), hidden)

    def hidden(self) -> torch.Tensor:
        """[vectors, H]"""
        vectors = self.report.hidden
        numbers = array(vectors[0].kind, b"".join(v.data for v in vectors))
        return torch.tensor(numbers).view(-1, vectors[0].size)


@dataclass(frozen=True, slots=True)
class Step:
    """A decode step."""

    num_rows: int
    draft_len: int
    masked: bool
    used_graph: bool | None
    num_tokens: int
    device_s: float
    done_s: float


class Watched:
    """An executor whose decode steps are noted."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.steps: list[Step] = []

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def launch(self, plan: StepPlan) -> PendingStep:
        return _Watched(self, plan, self._executor.launch(plan))

    def supply(self, masks: StepMidInput) -> None:
        self._executor.supply(masks)

    def shutdown(self) -> None:
        """It is used by others."""


@dataclass(frozen=True, slots=True)
class _Watched:
    by: Watched
    plan: StepPlan
    pending: PendingStep

    def drafts(self) -> StepDrafts:
        return self.pending.drafts()

    def wait(self) -> StepResult:
        result, plan = self.pending.wait(), self.plan
        if plan.kind is StepKind.DECODE:
            tokens = sum(len(ids) for ids in result.tokens)
            self.by.steps.append(
                Step(
                    len(plan.decode_slots), plan.draft_len, plan.masked, result.used_graph, tokens,
                    result.device_time_s, time.perf_counter(),
                )
            )  # fmt: skip
        return result


class Run:
    """One batch, all of it sent at once."""

    def __init__(
        self,
        executor: Executor,
        policy: Policy,
        decode: Callable[[Sequence[int]], str],
        grammars: GrammarCompiler | None,
        eos_ids: Sequence[int],
        chunk: int = CHUNK,
    ) -> None:
        self._watched = Watched(executor)
        self.answers: dict[str, Answer] = {}
        self._scheduler = Scheduler(
            executor=self._watched,
            config=SchedulerConfig(
                max_running_requests=executor.info.num_slots,
                chunked_prefill_size=chunk,
                enable_mixed_chunk=True,
                runs_processors=True,
            ),
            policy=policy,
            cache=NoCache(),
            decode=decode,
            eos_ids=eos_ids,
            emit=self._collect,
            reply=_expect_ok,
            metrics=NullSink(),
            clock=time.time,
            grammars=grammars,
        )

    @property
    def steps(self) -> list[Step]:
        return self._watched.steps

    def all_of(self, messages: Sequence[GenerateRequest]) -> dict[str, Answer]:
        for message in messages:
            self._scheduler.receive(message)
        for _ in range(MOST_TURNS):
            if not self._scheduler.has_work:
                break
            self._scheduler.step()
        assert not self._scheduler.has_work, "the batch does not come to an end"
        assert all(self.answers[message.rid].finish is not None for message in messages)
        return self.answers

    def _collect(self, batch: TokenBatch) -> None:
        for output in batch.outputs:
            answer = self.answers.setdefault(output.rid, Answer())
            answer.ids += output.new_ids
            answer.reports += [] if output.report is None else [output.report]
            answer.finish, answer.stats = output.finish, output.stats


def _expect_ok(reply: ControlReply) -> None:
    assert reply.ok, reply.error


@contextmanager
def waits_noted(device: str) -> Iterator[list[str]]:
    """Where a thread waited for the GPU by an operation of PyTorch's: the code's own innermost lines. Waiting
    for an event, as whoever reads a result does, is none of these.
    """
    found: list[str] = []
    if device != "cuda":
        yield found
        return

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            own = [
                f for f in traceback.extract_stack() if "sglang" in f.filename or "sgl_kernel" in f.filename
            ]
            found.append(" < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(own[-3:])))

    shown = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown
