"""Commit: the result of a step becomes host truth."""

from __future__ import annotations

from sglang.srt.managers.decode_tally import DecodeTally
from sglang.srt.managers.finish import INTERNAL_ERROR, Finisher, abort_reason
from sglang.srt.managers.grammars import held_to_grammar
from sglang.srt.managers.metrics import Load, PrefillReport
from sglang.srt.managers.outputs import OutputQueue
from sglang.srt.managers.page_budget import PageBudget
from sglang.srt.managers.planner import PlannedStep
from sglang.srt.managers.release import Releaser
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.stats import StatsRecorder
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.managers.toggle_settings import ToggleSettings
from sglang.srt.model_executor.step_plan import (
    PrefillChunk,
    RowReport,
    SpecShape,
    StepKind,
    StepPlan,
    StepResult,
)
from sglang.srt.speculative.controller import CommittedStep
from sglang.srt.speculative.row_acceptance import Outcomes


class Committer:
    def __init__(
        self,
        table: RequestTable,
        budget: PageBudget,
        releaser: Releaser,
        finisher: Finisher,
        outputs: OutputQueue,
        stops: StopChecker,
        stats: StatsRecorder,
        settings: ToggleSettings,
        spec: SpecShape | None,
    ) -> None:
        self._table = table
        self._budget = budget
        self._releaser = releaser
        self._finisher = finisher
        self._outputs = outputs
        self._stops = stops
        self._stats = stats
        self._settings = settings
        self._spec = spec

    def commit(self, step: PlannedStep, result: StepResult, now: float) -> None:
        plan = step.plan
        assert result.step_id == plan.step_id and len(result.tokens) == plan.num_rows == len(result.faults)
        self._stats.step_committed(now, result.device_time_s, result.used_graph)
        tally = DecodeTally(plan.draft_len, self._spec, bool(plan.row_drafts))
        told = _by_row(result)
        # Faults, tokens and reports are the rows': the decode requests' come first.
        rows = zip(
            step.decode_requests, result.tokens, result.faults, plan.drafts_of_rows, told, strict=False
        )
        for request, tokens, fault, drafts, report in rows:
            assert tokens or fault, "a decode row chose nothing"
            request.num_in_flight -= 1
            request.num_choosing -= 1
            if request.finish is not None:
                self._ended_before(request)
                continue
            if tokens:  # else a fault at once
                self._commit_decode(request, tokens, drafts, tally, report)
            if fault:
                self._end_at_fault(request)
        num_prefilled = 0
        for row, chunk in enumerate(plan.prefill, start=len(plan.decode_slots)):
            request = step.prefill_requests[row - len(plan.decode_slots)]
            request.num_in_flight -= 1
            request.num_choosing -= chunk.is_last
            if request.finish is not None:
                self._ended_before(request)
                continue
            self._commit_chunk(request, chunk, result.tokens[row], now, told[row])
            if result.faults[row]:
                self._end_at_fault(request)
            num_prefilled += len(chunk.token_ids)
        if plan.kind is StepKind.DECODE and step.decision is not None:
            self._settings.observe(
                CommittedStep(
                    decision=step.decision,
                    num_rows=len(step.decode_requests),
                    kv_tokens=step.kv_tokens,
                    device_time_s=result.device_time_s,
                    tallies=tally.by_class(),
                    outcomes=self._outcomes(step, result),
                )
            )
        self._report(step, tally, num_prefilled)

    def _outcomes(self, step: PlannedStep, result: StepResult) -> Outcomes | None:
        """What rows did, of requests that have ended too: for whoever tells them apart."""
        plan = step.plan
        if not plan.draft_len or not self._settings.tells_rows_apart:
            return None
        requests = list(step.decode_requests)
        correct = [len(tokens) - 1 for tokens in result.tokens]
        return Outcomes(requests, plan.drafts_of_rows, correct)

    def _ended_before(self, request: Request) -> None:
        """It ended while this step was on its way: what the row chose means nothing."""
        if not request.num_in_flight:
            self._releaser.give_back(request)

    def _end_at_fault(self, request: Request) -> None:
        """The tokens before the fault stand: in another mode they might have been a step of their own."""
        if request.finish is None:
            message = "the model's output was not finite (NaN or infinity) for this request"
            if request.processor is not None:
                message = (
                    "the custom logit processor failed, or left no finite logits: the server's log says why"
                )
            self._finisher.finish(request, abort_reason(message, INTERNAL_ERROR), keep_prefix=False)

    def _commit_decode(
        self,
        request: Request,
        tokens: tuple[int, ...],
        drafts: int,
        tally: DecodeTally,
        report: RowReport | None,
    ) -> None:
        """``drafts``: that its row verified."""
        most = request.max_accepted(drafts)
        rejected = most + 1 - len(tokens)
        assert rejected >= 0, f"{len(tokens)} tokens, {drafts} drafts"
        request.kv_committed_len += len(tokens)
        request.kv_len_bound -= rejected
        hit = held_to_grammar(request, tokens, self._stops.check(request, tokens))
        num_kept = hit.num_kept if hit else len(tokens)
        num_proposed = 0
        if tally.draft_len:
            num_proposed = tally.add(request, num_kept, len(tokens) - 1, drafts, most)
        else:
            tally.add_plain(request, num_kept)
        if drafts:
            request.counters.count_speculative(num_kept, len(tokens) - 1, num_proposed)
        else:
            request.counters.decode_steps_plain += 1
        request.ids += tokens[:num_kept]
        if report is not None and request.report is not None:
            request.report.add_decode(report, num_kept)
        if hit is not None:
            self._finisher.finish(request, hit.finish, hit.stop_trim)
        else:
            self._outputs.offer(request)

    def _commit_chunk(
        self,
        request: Request,
        chunk: PrefillChunk,
        tokens: tuple[int, ...],
        now: float,
        report: RowReport | None,
    ) -> None:
        assert request.kv_committed_len == chunk.start
        request.kv_committed_len += len(chunk.token_ids)
        assert not tokens or (chunk.is_last and len(tokens) == 1), "only the last chunk chooses a token"
        hit = held_to_grammar(request, tokens, self._stops.check(request, tokens)) if tokens else None
        num_kept = hit.num_kept if hit else len(tokens)
        if report is not None and request.report is not None:
            if tokens and not request.max_new_tokens:
                request.report.add_unkept(report, tokens[0])
            else:
                request.report.add_chunk(report, num_kept)
        if not tokens:  # not the last chunk, or a fault
            return
        if request.counters.first_token_ts is None:
            request.counters.first_token_ts = now
        request.ids += tokens[:num_kept]
        if hit is not None:
            self._finisher.finish(request, hit.finish, hit.stop_trim)
            return
        self._releaser.share_prefix(request)
        self._outputs.offer(request)

    def _report(self, step: PlannedStep, tally: DecodeTally, num_prefilled: int) -> None:
        load = self.load()
        if tally.num_rows:  # a step whose rows had all finished before it ran is not counted
            self._stats.decode_step(tally.report(), step.decision, step.mode, load)
        if num_prefilled:
            self._stats.prefill_step(_prefill_report(step.plan, num_prefilled), load)

    def load(self, is_paused: bool = False) -> Load:
        return Load(
            num_running=self._table.num_running,
            num_queued=len(self._table.waiting),
            num_grammar_queued=len(self._table.held),
            num_used_tokens=self._budget.num_used_tokens,
            num_evictable_tokens=self._budget.num_evictable_tokens,
            token_capacity=self._budget.token_capacity,
            num_paused=self._table.num_running if is_paused else 0,
            num_pending_tokens=self._table.num_pending_tokens,
        )


def _by_row(result: StepResult) -> list[RowReport | None]:
    """What each row tells: mostly nothing."""
    told: list[RowReport | None] = [None] * len(result.tokens)
    for report in result.reports:
        told[report.row] = report
    return told


def _prefill_report(plan: StepPlan, num_prefilled: int) -> PrefillReport:
    cached = sum(admission.cached_len for admission in plan.admissions)
    return PrefillReport(len(plan.admissions), num_prefilled, cached)
