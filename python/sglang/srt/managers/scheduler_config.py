"""What of the server's arguments the scheduler looks at."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.configs.priority_args import PriorityRules
from sglang.srt.configs.speculative_args import Threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    max_running_requests: int
    chunked_prefill_size: int | None = 2048  # tokens of a prefill step; None, 0 or -1: prompts stay whole
    max_prefill_tokens: int = 16384  # tokens of a prefill step (one whole prompt may exceed it)
    max_queued_requests: int | None = None
    enable_mixed_chunk: bool = False
    disable_overlap: bool = False
    stream_interval: int = 1
    decode_log_interval: int = 40
    speculative_disable_bs_threshold: Threshold = None
    speculative_bs_schedule: str | None = None  # given: instead of the threshold
    waiting_timeout_s: float | None = None  # None: however long it takes
    running_timeout_s: float | None = None
    priorities: PriorityRules | None = None  # None: first come, first served
    refuse_priorities: bool = False
    runs_processors: bool = False  # custom logit processors, which are code
    has_workers: bool = False  # several processes ask, and ids begin with who it is
    decode_reserve_tokens: int = 64  # room left for each running request when another is admitted

    def __post_init__(self) -> None:
        assert self.max_running_requests >= 1 and self.max_prefill_tokens >= 1
        assert self.stream_interval >= 1 and self.decode_log_interval >= 1

    @property
    def chunks_prompts(self) -> bool:
        return self.chunked_prefill_size is not None and self.chunked_prefill_size > 0

    @property
    def prefill_token_budget(self) -> int:
        if self.chunked_prefill_size is not None and self.chunked_prefill_size > 0:
            return min(self.chunked_prefill_size, self.max_prefill_tokens)
        return self.max_prefill_tokens
