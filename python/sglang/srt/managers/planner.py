"""One StepPlan from the state. Prefill goes before decode, as upstream."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.configs.speculative_args import Threshold
from sglang.srt.managers.admission import PrefillPlanner, PrefillWork
from sglang.srt.managers.decode_planner import Blocked, DecodePlanner, DecodeWork
from sglang.srt.managers.preemption import Preemptor
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.toggle_settings import ToggleSettings
from sglang.srt.model_executor.step_plan import RowWish, StepKind, StepPlan
from sglang.srt.speculative.schedule import BsSchedule
from sglang.srt.speculative.toggle import Decision

NO_DECODE = DecodeWork(requests=(), len_bounds=(), page_writes=(), draft_len=0, row_drafts=(), decision=None)
# With mixed chunks, decode rows take from the token budget, but never more than this part of it.
MIXED_DECODE_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A plan and whose rows it has (the executor knows slots only)."""

    plan: StepPlan
    decode_requests: tuple[Request, ...]
    prefill_requests: tuple[Request, ...]
    decision: Decision | None
    mode: Threshold | BsSchedule  # by which it was decided
    kv_tokens: int  # of the decode rows, at most


class Planner:
    def __init__(
        self,
        table: RequestTable,
        prefill: PrefillPlanner,
        decode: DecodePlanner,
        preemptor: Preemptor,
        config: SchedulerConfig,
        settings: ToggleSettings,
    ) -> None:
        self._table = table
        self._prefill = prefill
        self._decode = decode
        self._preemptor = preemptor
        self._config = config
        self._settings = settings
        self._next_step_id = 0

    def plan(self, step_in_flight: bool) -> PlannedStep | Blocked:
        if not self._preemptor.make_way(step_in_flight):
            return Blocked.COMMIT_FIRST
        prefill = self._prefill.plan(self._prefill_tokens())
        if not prefill.chunks:
            decode = self._decode.plan(step_in_flight)
            return decode if isinstance(decode, Blocked) else self._compose(prefill, decode)
        mixed = self._decode.plan_mixed() if self._config.enable_mixed_chunk else None
        return self._compose(prefill, mixed or NO_DECODE)

    def _prefill_tokens(self) -> int:
        tokens = self._config.prefill_token_budget
        if not self._config.enable_mixed_chunk:
            return tokens
        taken = min(len(self._table.decoding), int(tokens * MIXED_DECODE_SHARE))
        return max(1, tokens - taken)

    def _compose(self, prefill: PrefillWork, decode: DecodeWork) -> PlannedStep:
        plan = StepPlan(
            step_id=self._next_step_id,
            kind=_kind(prefill, decode),
            decode_slots=tuple(request.slot for request in decode.requests),
            decode_len_bounds=decode.len_bounds,
            draft_len=decode.draft_len,
            row_drafts=decode.row_drafts,
            prefill=tuple(prefill.chunks),
            admissions=tuple(prefill.admissions),
            page_writes=(*prefill.page_writes, *decode.page_writes),
            masked=_is_masked(decode.requests, prefill),
            wishes=_wishes(decode.requests, prefill),
        )
        self._next_step_id += 1
        self._note_rows(plan, decode, prefill)
        return PlannedStep(
            plan=plan,
            decode_requests=decode.requests,
            prefill_requests=tuple(prefill.requests),
            decision=decode.decision,
            mode=self._settings.in_force,
            kv_tokens=sum(decode.len_bounds),
        )

    def _note_rows(self, plan: StepPlan, decode: DecodeWork, prefill: PrefillWork) -> None:
        for request, drafts in zip(decode.requests, plan.drafts_of_rows, strict=True):
            request.num_in_flight += 1
            request.num_choosing += 1
            request.kv_len_bound += request.max_accepted(drafts) + 1
        for request, chunk in zip(prefill.requests, prefill.chunks, strict=True):
            request.num_in_flight += 1
            request.num_choosing += chunk.is_last
            request.kv_len_bound += len(chunk.token_ids)
            if chunk.is_last:
                self._table.begin_decoding(request)


def _is_masked(decoding: tuple[Request, ...], prefill: PrefillWork) -> bool:
    """Whether the host has a say in what some row of the step chooses."""
    # As ``waits_for_host``, without a call: every row of every step comes here.
    if any(request.constraint is not None or request.processor is not None for request in decoding):
        return True
    rows = zip(prefill.requests, prefill.chunks, strict=True)
    return any(request.waits_for_host and chunk.is_last for request, chunk in rows)


def _wishes(decoding: tuple[Request, ...], prefill: PrefillWork) -> tuple[RowWish, ...]:
    wishes: list[RowWish | None] = [
        request.report.of_decode(row) for row, request in enumerate(decoding) if request.report is not None
    ]
    chunks = zip(prefill.requests, prefill.chunks, strict=True)
    for row, (request, chunk) in enumerate(chunks, start=len(decoding)):
        if request.report is not None:
            wishes.append(request.report.of_chunk(row, chunk))
    return tuple(wish for wish in wishes if wish is not None)


def _kind(prefill: PrefillWork, decode: DecodeWork) -> StepKind:
    if not prefill.chunks:
        return StepKind.DECODE
    return StepKind.MIXED if decode.requests else StepKind.PREFILL
