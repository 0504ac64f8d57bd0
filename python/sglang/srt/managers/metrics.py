"""What the scheduler reports as it commits, and the sink that hears it. Plain data, no Prometheus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class EngineConstants:
    token_capacity: int
    page_size: int
    num_pages: int
    context_len: int
    spec_num_steps: int | None  # None: no drafter
    spec_num_draft_tokens: int | None
    weight_bytes: int
    kv_bytes: int
    has_graphs: bool = False  # a device whose decode steps may be CUDA graphs
    graph_bytes: tuple[tuple[str, int], ...] = ()  # by set of graphs
    max_running: int = 0  # requests at once


@dataclass(frozen=True, slots=True)
class Load:
    num_running: int
    num_queued: int
    num_used_tokens: int
    num_evictable_tokens: int
    token_capacity: int
    num_grammar_queued: int = 0  # their grammars are being compiled
    num_paused: int = 0  # running ones, on a server that is paused
    num_pending_tokens: int = 0  # of prompts, and of answers that come back, that no step has computed

    @property
    def token_usage(self) -> float:
        return self.num_used_tokens / self.token_capacity

    @property
    def num_available_tokens(self) -> int:
        return self.token_capacity - self.num_used_tokens


@dataclass(frozen=True, slots=True)
class DecodeReport:
    """The decode rows of one step, those of requests finished before it left out."""

    draft_len: int  # 0: plain
    num_rows: int
    num_tokens: int  # emitted, what a stop cut off left out
    num_correct_drafts: int = 0
    num_proposed_drafts: int = 0
    proposed_by_depth: tuple[int, ...] = ()  # rows that could accept a draft at depth 1, 2, …
    correct_by_depth: tuple[int, ...] = ()
    sum_seq_lens: int = 0  # tokens of the rows' requests, prompts counted
    is_ragged: bool = False  # rows had draft lengths of their own, at most ``draft_len``

    @property
    def mode(self) -> str:
        return "spec" if self.draft_len else "plain"


@dataclass(frozen=True, slots=True)
class PrefillReport:
    num_requests: int  # admitted in this step
    num_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class IntervalReport:
    """Figures over the last ``decode_log_interval`` decode steps."""

    gen_throughput: float  # tokens per second
    accept_length: float | None  # of speculative steps; None: there were none
    accept_rate: float | None
    occupancy: float | None = None  # part of the time in which the device worked


class MetricsSink(Protocol):
    def constants(self, constants: EngineConstants) -> None: ...

    def load(self, load: Load) -> None: ...

    def decode_step(self, report: DecodeReport) -> None: ...

    def graph_step(self, used_graph: bool) -> None:
        """A decode step on a device that has CUDA graphs."""
        ...

    def prefill_step(self, report: PrefillReport) -> None: ...

    def interval(self, report: IntervalReport) -> None: ...

    def decided(self, draft_len: int, reason: str) -> None:
        """The mode of a decode step and why, on a server with a drafter."""
        ...

    def switched(self, to: str, reason: str) -> None: ...

    def retracted(self, num_input_tokens: int, num_output_tokens: int) -> None: ...

    def finished(self, aborted: bool) -> None: ...

    def evicted(self, num_tokens: int) -> None: ...


class NullSink:
    """Without --enable-metrics."""

    def constants(self, constants: EngineConstants) -> None:
        return None

    def load(self, load: Load) -> None:
        return None

    def decode_step(self, report: DecodeReport) -> None:
        return None

    def graph_step(self, used_graph: bool) -> None:
        return None

    def prefill_step(self, report: PrefillReport) -> None:
        return None

    def interval(self, report: IntervalReport) -> None:
        return None

    def decided(self, draft_len: int, reason: str) -> None:
        return None

    def switched(self, to: str, reason: str) -> None:
        return None

    def retracted(self, num_input_tokens: int, num_output_tokens: int) -> None:
        return None

    def finished(self, aborted: bool) -> None:
        return None

    def evicted(self, num_tokens: int) -> None:
        return None
