"""What a worker is built with: sizes and names, nothing that changes while it runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.model_executor.step_plan import SpecShape


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    device: torch.device
    dtype: torch.dtype
    num_slots: int  # usable ones, PAD_SLOT not counted
    num_pages: int  # usable ones, PAD_PAGE not counted
    page_size: int
    context_len: int  # most tokens of one request
    vocab_size: int
    spec: SpecShape | None = None  # None: no drafter
    max_spec_rows: int = 0  # decode rows a speculative step may have
    feature_size: int = 0  # H_draft; 0 without a drafter, or with one that reads no hidden states
    kv_dtype: torch.dtype | None = None  # of the caches; None: ``dtype``

    def __post_init__(self) -> None:
        assert self.num_slots > 0 and self.num_pages > 0 and self.page_size > 0
        assert (self.spec is None) == (self.max_spec_rows == 0)
        assert self.spec is not None or self.feature_size == 0

    @property
    def cache_dtype(self) -> torch.dtype:
        return self.kv_dtype or self.dtype

    @property
    def num_rows(self) -> int:
        """Rows of every tensor indexed by slot."""
        return self.num_slots + 1

    @property
    def max_positions(self) -> int:
        return max_positions(self.context_len, self.spec)

    @property
    def max_pages(self) -> int:
        """Page-table entries a slot."""
        return -(-self.max_positions // self.page_size)


def max_positions(context_len: int, spec: SpecShape | None) -> int:
    """Positions a request may touch: one that has just finished may be stepped once more."""
    num_steps, num_nodes = (spec.num_steps, spec.num_draft_tokens) if spec else (0, 1)
    return context_len + 2 * (num_steps + 1) + num_nodes
