"""Answers to control messages: flush the cache, change the state; and what the state is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.io_struct import (
    ControlReply,
    FlushCacheRequest,
    SetStateRequest,
)
from sglang.srt.managers.page_budget import PageBudget
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.managers.stats import StatsRecorder
from sglang.srt.managers.toggle_settings import SCHEDULE, THRESHOLD, ModeError, ToggleSettings
from sglang.srt.mem_cache.prefix_cache import PrefixCache
from sglang.srt.model_executor.step_plan import ExecutorInfo, GraphSet

SETTABLE = (THRESHOLD, SCHEDULE)
GIB = 1 << 30


class Controls:
    def __init__(
        self,
        table: RequestTable,
        budget: PageBudget,
        cache: PrefixCache,
        settings: ToggleSettings,
        stats: StatsRecorder,
        config: SchedulerConfig,
        info: ExecutorInfo,
        reply: Callable[[ControlReply], None],
    ) -> None:
        self._table = table
        self._budget = budget
        self._cache = cache
        self._settings = settings
        self._stats = stats
        self._reply = reply
        self._fixed = _fixed_state(config, info, budget)

    def flush_cache(self, message: FlushCacheRequest, is_paused: bool = False) -> None:
        """No step is in flight if the table is empty, or the server paused."""
        if not (self._table.is_empty or (is_paused and not self._table.num_running)):
            error = (
                "Flush cache failed: there are pending requests "
                f"(#queue-req: {len(self._table.waiting)}, #running-req: {self._table.num_running})"
            )
            self._reply(ControlReply(request_id=message.request_id, ok=False, error=error))
            return
        self._budget.free(self._cache.reset())
        self._stats.reset_acceptance()
        self._reply(ControlReply(request_id=message.request_id, ok=True))

    def set_state(self, message: SetStateRequest) -> None:
        """All of the change or nothing."""
        error = self._change(message.server_args)
        if error:
            self._reply(ControlReply(request_id=message.request_id, ok=False, error=error))
            return
        now = self._settings.figures()
        body = {name: now[name] for name in message.server_args}
        self._reply(ControlReply(request_id=message.request_id, ok=True, body=body))

    def _change(self, wanted: dict[str, Any]) -> str:
        """An error for the user, or nothing."""
        accepted = ", ".join(SETTABLE)
        unknown = sorted(set(wanted) - set(SETTABLE))
        if unknown:
            return f"cannot be changed on a running server: {', '.join(unknown)}; accepted: {accepted}"
        if not wanted:
            return f"nothing to change was given; accepted: {accepted}"
        try:
            self._settings.set(wanted)
        except ModeError as error:
            return str(error)
        return ""

    def internal_state(self, is_idle: bool, is_paused: bool = False) -> dict[str, Any]:
        """``internal_states[0]`` of /server_info, the resolved arguments left out. Made in every step."""
        state: dict[str, Any] = {
            **self._fixed,
            "num_running_reqs": self._table.num_running,
            "num_queue_reqs": len(self._table.waiting),
            "is_paused": is_paused,
        }
        if self._settings.has_drafter:
            state |= self._settings.figures()
            auto = self._settings.auto_figures(is_idle)
            if auto is not None:
                state["spec_auto"] = auto
        return state | self._stats.figures()


def _fixed_state(config: SchedulerConfig, info: ExecutorInfo, budget: PageBudget) -> dict[str, Any]:
    state: dict[str, Any] = {
        "effective_max_running_requests_per_dp": min(config.max_running_requests, info.num_slots),
        "memory_usage": {
            "weight": round(info.weight_bytes / GIB, 3),
            "kvcache": round(info.kv_bytes / GIB, 3),
            "token_capacity": budget.token_capacity,
        },
    }
    return state | _graph_state(info.graphs) if info.graphs else state


def _graph_state(sets: Sequence[GraphSet]) -> dict[str, Any]:
    """``cuda_graphs`` is ours; the other two are SGLang's."""
    several = sum(graphs.draft_len > 0 for graphs in sets) > 1
    return {
        "cuda_graphs": {
            f"{graphs.name}_{graphs.draft_len}" if several and graphs.draft_len else graphs.name: {
                "draft_len": graphs.draft_len,
                "sizes": list(graphs.sizes),
                "seconds": round(graphs.seconds, 3),
                "bytes": graphs.bytes,
                **({"ragged": [list(size) for size in graphs.ragged]} if graphs.ragged else {}),
            }
            for graphs in sets
        },
        "decode_cuda_graph_bs": list(sets[0].sizes),  # the plain ones
        "decode_cuda_graph_memory_gb": round(sum(graphs.bytes for graphs in sets) / GIB, 3),
    }
