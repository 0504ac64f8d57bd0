"""The loop: receive -> plan -> launch -> commit -> emit.

Overlap changes only when commit runs: with it, step n is committed after step n+1 has been
launched; without it, a step is committed as soon as it has been launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.managers.admission import PrefillPlanner
from sglang.srt.managers.commit import Committer
from sglang.srt.managers.control import Controls
from sglang.srt.managers.deadlines import Deadlines
from sglang.srt.managers.decode_planner import Blocked, DecodePlanner
from sglang.srt.managers.finish import BAD_REQUEST, UNAVAILABLE, Finisher, abort_reason
from sglang.srt.managers.grammars import NO_BACKEND, Grammars
from sglang.srt.managers.intake import Intake
from sglang.srt.managers.io_struct import (
    AbortRequest,
    ContinueRequest,
    ControlReply,
    FlushCacheRequest,
    GenerateRequest,
    PauseRequest,
    SetStateRequest,
    TokenBatch,
    ToScheduler,
    rid_in_use,
)
from sglang.srt.managers.metrics import EngineConstants, MetricsSink
from sglang.srt.managers.outputs import OutputQueue
from sglang.srt.managers.page_budget import PageBudget
from sglang.srt.managers.planner import PlannedStep, Planner
from sglang.srt.managers.preemption import Preemptor
from sglang.srt.managers.release import Releaser
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.retraction import Retractor
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.stats import StatsRecorder
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.managers.toggle_settings import ToggleSettings
from sglang.srt.mem_cache.page_allocator import PageAllocator
from sglang.srt.mem_cache.prefix_cache import PrefixCache
from sglang.srt.mem_cache.slot_allocator import SlotAllocator
from sglang.srt.model_executor.executor import Executor, PendingStep
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepKind
from sglang.srt.speculative.controller import AutoController
from sglang.srt.speculative.toggle import Policy

COMPILING_WAIT_S = 0.005
"""How long a scheduler with nothing else to do waits for a grammar before it looks for messages."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    planned: PlannedStep
    pending: PendingStep
    schedule_s: float | None  # since the result before it; None: there was nothing to do meanwhile


class Scheduler:
    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig,
        policy: Policy,
        cache: PrefixCache,
        decode: Callable[[list[int]], str],
        eos_ids: Sequence[int],
        emit: Callable[[TokenBatch], None],
        reply: Callable[[ControlReply], None],
        metrics: MetricsSink,
        clock: Callable[[], float],
        auto: AutoController | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        """``policy``: of thresholds; ``auto``: where it may be chosen, because costs are known; ``grammars``
        None: requests with one are refused.
        """
        info = executor.info
        has_drafter = info.spec is not None
        self._executor = executor
        self._config = config
        self._clock = clock
        self._in_flight: LaunchedStep | None = None
        self._last_result_ts: float | None = None  # None: idle since, or a step has been launched since
        self._is_paused = False
        self._send_reply = reply
        self.cache = cache
        self.pages = PageAllocator(info.num_pages)
        self.slots = SlotAllocator(info.num_slots)
        self.table = RequestTable(by_priority=config.priorities is not None)
        self._budget = PageBudget(self.pages, cache, info.page_size)
        self._settings = ToggleSettings(info, policy, auto)
        self._settings.begin(config.speculative_disable_bs_threshold, config.speculative_bs_schedule)
        self._stats = StatsRecorder(
            metrics, config.decode_log_interval, has_drafter, has_graphs=info.device == "cuda"
        )
        self._outputs = OutputQueue(emit, config.stream_interval)
        self._releaser = Releaser(self._budget, self.slots, cache, has_drafter)
        self._finisher = Finisher(self.table, self._releaser, self._outputs, self._stats)
        self._deadlines = Deadlines(
            self.table, self._finisher, config.waiting_timeout_s, config.running_timeout_s
        )
        self._grammars = Grammars(grammars, self.table, self._finisher, decode, info.vocab_size)
        stops = StopChecker(eos_ids, decode)
        self._intake = Intake(
            info,
            stops,
            config.priorities,
            config.refuse_priorities,
            config.runs_processors,
            config.has_workers,
        )
        self._planner = self._make_planner(info)
        self._committer = Committer(
            self.table, self._budget, self._releaser, self._finisher, self._outputs, stops, self._stats,
            self._settings, info.spec,
        )  # fmt: skip
        self._controls = Controls(
            self.table, self._budget, cache, self._settings, self._stats, config, info, self._reply
        )
        self._state = self._controls.internal_state(is_idle=True)
        metrics.constants(_constants(info, config.max_running_requests))
        self._report_load()

    def _make_planner(self, info: ExecutorInfo) -> Planner:
        prefill = PrefillPlanner(
            self.table, self._budget, self.slots, self.cache, self._finisher, self._config,
            info.spec is not None, info.wants_ids,
        )  # fmt: skip
        self._retractor = Retractor(self.table, self._budget, self._releaser, self._finisher, self._stats)
        decode = DecodePlanner(self.table, self._budget, self._retractor, self._settings, info.spec)
        priorities = self._config.priorities
        threshold = None if priorities is None else priorities.preemption_threshold
        preemptor = Preemptor(self.table, prefill, self._retractor, threshold)
        return Planner(self.table, prefill, decode, preemptor, self._config, self._settings)

    # ---- receive -------------------------------------------------------------------------------

    def receive(self, message: ToScheduler) -> None:
        if isinstance(message, GenerateRequest):
            self._add(message)
        elif isinstance(message, AbortRequest):
            self._abort(message)
        elif isinstance(message, FlushCacheRequest):
            self._flush_cache(message)
        elif isinstance(message, PauseRequest):
            self._pause(message)
        elif isinstance(message, ContinueRequest):
            self._is_paused = False
            self._report_load()
            self._reply(ControlReply(message.request_id, ok=True))
        else:
            assert isinstance(message, SetStateRequest)
            self._set_state(message)
        self._publish()
        self._outputs.flush()

    def _add(self, message: GenerateRequest) -> None:
        objection = self._intake.objection(message)
        limit = self._config.max_queued_requests
        request = self._intake.make(message)
        if objection is None and self.table.has_name(request.name):
            objection = abort_reason(rid_in_use(request.name), BAD_REQUEST)
        if objection is None and limit is not None and self.table.num_queued >= limit:
            objection = abort_reason(f"the request queue is full ({limit} requests wait)", UNAVAILABLE)
        if objection is None and request.grammar is not None and not self._grammars.has_backend:
            objection = abort_reason(NO_BACKEND, BAD_REQUEST)
        if objection is not None:
            self._finisher.refuse(request, objection)
        elif request.grammar is not None:
            self._grammars.enqueue(request, request.grammar)
        else:
            self._grammars.add_rules(request)
            self.table.enqueue(request)

    def _abort(self, message: AbortRequest) -> None:
        """At any moment: waiting, between chunks, with a step in flight; a finished one is no matter."""
        found = self.table.get(message.rid)
        victims = self.table.all() if message.abort_all else [] if found is None else [found]
        for request in victims:
            self._finisher.finish(request, abort_reason(message.reason))
        self._report_load()

    def _flush_cache(self, message: FlushCacheRequest) -> None:
        self._settle()
        self._controls.flush_cache(message, self._is_paused)

    def _pause(self, message: PauseRequest) -> None:
        self._commit_in_flight()
        self._is_paused = True
        if message.retract:
            self._retractor.retract_all()
        self._report_load()
        self._reply(ControlReply(message.request_id, ok=True))

    def _set_state(self, message: SetStateRequest) -> None:
        self._settle()  # the figures that follow are those of the new state alone
        self._controls.set_state(message)

    def _settle(self) -> None:
        """A step whose rows have all finished may still be on its way."""
        if self.table.is_empty:
            self._commit_in_flight()

    # ---- plan, launch, commit, emit ------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return not self._is_paused and (not self.table.is_empty or self._in_flight is not None)

    def step(self) -> bool:
        """One turn of the loop; False if there was nothing to do."""
        if self._deadlines.is_set:
            self._deadlines.expire(self._clock())
        self._grammars.release_ready()
        planned = self._planner.plan(step_in_flight=self._in_flight is not None)
        launched = self._launch(planned) if isinstance(planned, PlannedStep) else None
        committed = False
        if not self._config.disable_overlap:
            committed = self._commit_in_flight()
        if launched is not None and launched.planned.plan.masked:
            self._supply_masks(launched)
        self._in_flight = launched
        if self._config.disable_overlap:
            committed = self._commit_in_flight()
        self._publish()
        self._outputs.flush()
        self._report_load()
        progressed = launched is not None or committed or planned is Blocked.PLAN_AGAIN
        if not progressed and self._grammars.is_compiling:
            self._grammars.wait(COMPILING_WAIT_S)
            return True
        assert progressed or not self.has_work, "requests wait, and nothing can run"
        return progressed

    def drain(self) -> None:
        """Work until everything received has been answered."""
        while self.has_work:
            self.step()

    def _launch(self, planned: PlannedStep) -> LaunchedStep:
        pending = self._executor.launch(planned.plan)
        since, self._last_result_ts = self._last_result_ts, None
        now = self._clock()
        for request in planned.prefill_requests:
            if request.counters.admitted_ts is None:
                request.counters.admitted_ts = now
        return LaunchedStep(planned, pending, None if since is None else now - since)

    def _supply_masks(self, step: LaunchedStep) -> None:
        """Every step before this one has been committed, so grammars are where its rows begin."""
        drafts = step.pending.drafts() if step.planned.plan.draft_len else None
        self._executor.supply(self._grammars.masks(step.planned, drafts))

    def _commit_in_flight(self) -> bool:
        step, self._in_flight = self._in_flight, None
        if step is None:
            return False
        result = step.pending.wait()
        now = self._last_result_ts = self._clock()
        if step.planned.plan.kind is StepKind.DECODE and step.schedule_s is not None:
            self._stats.decode_launched(step.schedule_s, result.launch_time_s)
        self._committer.commit(step.planned, result, now)
        return True

    def _report_load(self) -> None:
        load = self._committer.load(self._is_paused)
        self._stats.load(load, self._budget.num_evicted * self._budget.page_size)
        if not self.has_work:
            self._stats.idle()
            self._last_result_ts = None

    @property
    def state(self) -> dict[str, Any]:
        """As of the last step or message; another thread may read it at any time."""
        return self._state

    def live(self, after_step: int) -> dict[str, Any]:
        """The steps after that number, and the load; for any thread, as ``state``."""
        return self._stats.live(after_step, self._clock())

    def _publish(self) -> None:
        """Before anything is sent, so that who has the answer finds it in the state too.

        A new object each time: a reader has the old one or the new one, whole.
        """
        self._state = self._controls.internal_state(not self.has_work, self._is_paused)

    def _reply(self, reply: ControlReply) -> None:
        self._publish()
        self._send_reply(reply)


def _constants(info: ExecutorInfo, max_running: int) -> EngineConstants:
    return EngineConstants(
        token_capacity=info.num_pages * info.page_size,
        page_size=info.page_size,
        num_pages=info.num_pages,
        context_len=info.context_len,
        spec_num_steps=info.spec.num_steps if info.spec else None,
        spec_num_draft_tokens=info.spec.num_draft_tokens if info.spec else None,
        weight_bytes=info.weight_bytes,
        kv_bytes=info.kv_bytes,
        has_graphs=info.device == "cuda",
        graph_bytes=tuple(
            (f"{g.name}_{g.draft_len}" if g.draft_len else g.name, g.bytes) for g in info.graphs
        ),
        max_running=min(max_running, info.num_slots),
    )
