"""Figures of the engine: fed at commit, kept for /server_info, written to the log, passed to the sink.

Acceptance looks at speculative steps alone: a plain step says nothing about the drafter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.managers.metrics import DecodeReport, IntervalReport, Load, MetricsSink, PrefillReport
from sglang.srt.managers.step_ring import StepRing, tokens_per_second
from sglang.srt.speculative.toggle import Decision, SwitchCounter

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Acceptance:
    """Sums over speculative steps."""

    num_rows: int = 0
    num_tokens: int = 0
    num_correct: int = 0
    num_proposed: int = 0
    proposed_by_depth: list[int] = field(default_factory=list)
    correct_by_depth: list[int] = field(default_factory=list)

    def add(self, report: DecodeReport) -> None:
        if report.draft_len == 0:
            return
        self.num_rows += report.num_rows
        self.num_tokens += report.num_tokens
        self.num_correct += report.num_correct_drafts
        self.num_proposed += report.num_proposed_drafts
        _add_to(self.proposed_by_depth, report.proposed_by_depth)
        _add_to(self.correct_by_depth, report.correct_by_depth)

    @property
    def length(self) -> float | None:
        return self.num_tokens / self.num_rows if self.num_rows else None

    @property
    def rate(self) -> float | None:
        return self.num_correct / self.num_proposed if self.num_proposed else None

    @property
    def by_depth(self) -> list[float]:
        """Part of the drafts at depth 1, 2, … that were accepted."""
        pairs = zip(self.correct_by_depth, self.proposed_by_depth, strict=True)
        return [correct / proposed if proposed else 0.0 for correct, proposed in pairs]


def _add_to(sums: list[int], values: tuple[int, ...]) -> None:
    sums.extend([0] * (len(values) - len(sums)))
    for index, value in enumerate(values):
        sums[index] += value


@dataclass(slots=True)
class Interval:
    """Since the last decode log line. Time in which there was nothing to do is not in it."""

    num_steps: int = 0
    num_tokens: int = 0
    busy_s: float = 0.0
    device_s: float = 0.0
    acceptance: Acceptance = field(default_factory=Acceptance)


@dataclass(slots=True)
class HostTime:
    """Of decode steps that followed another step, since the start; a GPU step hides it if it is longer."""

    num_steps: int = 0
    schedule_s: float = 0.0  # from a result to the next launch: commit, send, receive, plan
    launch_s: float = 0.0  # in the executor's thread

    def add(self, schedule_s: float, launch_s: float) -> None:
        self.num_steps += 1
        self.schedule_s += schedule_s
        self.launch_s += launch_s

    def figures(self, is_launched: bool) -> dict[str, float]:
        """``is_launched``: a step is launched, and runs elsewhere."""
        figures: dict[str, float] = {"steps": self.num_steps, "schedule_s": self.schedule_s}
        return figures | {"launch_s": self.launch_s} if is_launched else figures


class StatsRecorder:
    def __init__(
        self, sink: MetricsSink, decode_log_interval: int, has_drafter: bool, has_graphs: bool = False
    ) -> None:
        self._sink = sink
        self._log_interval = decode_log_interval
        self._has_drafter = has_drafter
        self._has_graphs = has_graphs
        self._num_eager_steps = 0
        self._used_graph: bool | None = None  # by the last decode step
        self._host_time = HostTime()
        self._interval = Interval()
        self._last_commit_ts: float | None = None
        self._num_evicted_tokens = 0
        self._switches = SwitchCounter()
        self._acceptance = Acceptance()  # since the start or the last flush of the cache
        self._decode_steps = {"plain": 0, "spec": 0}
        self._decisions: dict[tuple[int, str], int] = {}  # (draft length, reason) -> how often
        self._last_draft_len = 0
        self._last_gen_throughput = 0.0
        self._ring = StepRing()
        self._load: Load | None = None

    # ---- fed by the scheduler ------------------------------------------------------------------

    def step_committed(self, now: float, device_time_s: float, used_graph: bool | None = None) -> None:
        """``used_graph`` None: not a decode step, or a device without CUDA graphs."""
        if used_graph is not None:
            self._used_graph = used_graph
            self._num_eager_steps += not used_graph
            self._sink.graph_step(used_graph)
        last = self._last_commit_ts
        self._interval.busy_s += device_time_s if last is None else max(0.0, now - last)
        self._interval.device_s += device_time_s
        self._last_commit_ts = now

    def decode_launched(self, schedule_s: float, launch_s: float) -> None:
        self._host_time.add(schedule_s, launch_s)

    def decode_step(self, report: DecodeReport, decision: Decision | None, mode: object, load: Load) -> None:
        """``decision`` None: a mixed step, which has no choice; ``mode``: by what it was decided."""
        self._last_draft_len = report.draft_len
        self._decode_steps[report.mode] += 1
        self._acceptance.add(report)
        self._ring.add(report.draft_len, report.num_rows, report.num_tokens, self._last_commit_ts or 0.0)
        self._sink.decode_step(report)
        if decision is not None:
            if self._has_drafter:
                self._count_decision(decision)
            switch = self._switches.record(decision, mode)
            if switch is not None:
                self._sink.switched(*switch)
        interval = self._interval
        interval.num_steps += 1
        interval.num_tokens += report.num_tokens
        interval.acceptance.add(report)
        if interval.num_steps >= self._log_interval:
            self._close_interval(report, load)

    def _count_decision(self, decision: Decision) -> None:
        key = (decision.draft_len, str(decision.reason))
        self._decisions[key] = self._decisions.get(key, 0) + 1
        self._sink.decided(*key)

    def prefill_step(self, report: PrefillReport, load: Load) -> None:
        self._sink.prefill_step(report)
        logger.info(
            "Prefill batch, #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
            "#running-req: %d, #queue-req: %d",
            report.num_requests, report.num_tokens, report.num_cached_tokens, load.token_usage,
            load.num_running, load.num_queued,
        )  # fmt: skip

    def load(self, load: Load, num_evicted_tokens: int) -> None:
        self._load = load
        self._sink.load(load)
        if num_evicted_tokens > self._num_evicted_tokens:
            self._sink.evicted(num_evicted_tokens - self._num_evicted_tokens)
            self._num_evicted_tokens = num_evicted_tokens

    def idle(self) -> None:
        self._last_commit_ts = None

    def retracted(self, num_input_tokens: int, num_output_tokens: int) -> None:
        self._sink.retracted(num_input_tokens, num_output_tokens)

    def finished(self, aborted: bool) -> None:
        self._sink.finished(aborted)

    def reset_acceptance(self) -> None:
        self._acceptance = Acceptance()

    # ---- read ----------------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        """Its part of ``internal_states[0]``; a figure that has no value yet is absent."""
        figures: dict[str, Any] = {
            "last_gen_throughput": self._last_gen_throughput,
            "decode_steps": dict(self._decode_steps),
            "decode_host_time": self._host_time.figures(self._has_graphs),
        }
        if self._has_graphs:
            figures["cuda_graph_eager_steps"] = self._num_eager_steps
        if not self._has_drafter:
            return figures
        figures["spec_draft_len"] = self._last_draft_len
        figures["spec_decisions"] = {
            f"{draft_len}:{reason}": count for (draft_len, reason), count in self._decisions.items()
        }
        figures["spec_switches"] = self._switches.total
        figures["spec_switches_by_reason"] = {
            f"{to}:{reason}": count for (to, reason), count in self._switches.counts.items()
        }
        figures["spec_accept_by_position"] = self._acceptance.by_depth
        if self._acceptance.length is not None:
            figures["avg_spec_accept_length"] = self._acceptance.length
        if self._acceptance.rate is not None:
            figures["avg_spec_accept_rate"] = self._acceptance.rate
        return figures

    def live(self, after_step: int, now: float) -> dict[str, Any]:
        """What the page at /dashboard draws: steps after that number, and the load. For any thread."""
        steps, load = self._ring.after(0), self._load
        live: dict[str, Any] = {
            "last_step": steps[-1].number if steps else 0,
            "steps": [step.row for step in steps if step.number > after_step],
            "tokens_per_second": round(tokens_per_second(steps, now), 2),
        }
        if load is not None:
            live["kv_used_tokens"] = load.num_used_tokens
            live["kv_evictable_tokens"] = load.num_evictable_tokens
            live["kv_capacity_tokens"] = load.token_capacity
            live["num_grammar_queue_reqs"] = load.num_grammar_queued
            live["num_paused_reqs"] = load.num_paused
            live["num_pending_tokens"] = load.num_pending_tokens
        return live

    def _close_interval(self, report: DecodeReport, load: Load) -> None:
        interval, self._interval = self._interval, Interval()
        throughput = interval.num_tokens / interval.busy_s if interval.busy_s > 0 else 0.0
        self._last_gen_throughput = throughput
        acceptance = interval.acceptance
        occupancy = min(1.0, interval.device_s / interval.busy_s) if interval.busy_s > 0 else None
        self._sink.interval(IntervalReport(throughput, acceptance.length, acceptance.rate, occupancy))
        parts = [f"Decode batch, #running-req: {load.num_running}"]
        if self._has_drafter:
            ragged = ", ragged" if report.is_ragged else ""
            parts.append(f"mode: spec(k={report.draft_len}{ragged})" if report.draft_len else "mode: plain")
        parts.append(f"#token: {load.num_used_tokens}, token usage: {load.token_usage:.2f}")
        if acceptance.length is not None:
            parts.append(f"accept len: {acceptance.length:.2f}")
        if acceptance.rate is not None:
            parts.append(f"accept rate: {acceptance.rate:.2f}")
        if self._used_graph is not None:
            parts.append(f"cuda graph: {self._used_graph}")
        parts.append(f"gen throughput (token/s): {throughput:.2f}, #queue-req: {load.num_queued}")
        logger.info("%s", ", ".join(parts))
