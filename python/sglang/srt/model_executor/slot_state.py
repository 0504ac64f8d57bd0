"""The state of every request between two steps, indexed by slot.

Nothing in it says which mode made it or which mode comes next: ``seq_len`` committed tokens whose KV
is in the cache, one chosen token that is not, the target's feature at the last committed position,
and where the KV lies.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.step_plan import PAD_PAGE, PAD_SLOT, PageWrite, SlotAdmission
from sglang.srt.utils.upload import ints, ranges, upload, upload_all


class SlotState:
    """Owner of the tensors below; written by admission, page writes and ``advance`` only."""

    def __init__(self, config: WorkerConfig) -> None:
        rows, device = config.num_rows, config.device
        self.device = device
        self.seq_len = torch.ones(rows, dtype=torch.int32, device=device)  # [slots] L; pad slot: 1
        self.next_token = torch.zeros(rows, dtype=torch.int64, device=device)  # [slots] x_L
        self.draft_feature = torch.zeros(  # [slots, H_draft] g_{L-1}
            rows, config.feature_size, dtype=config.dtype, device=device
        )
        self.page_table = torch.full(  # [slots, max_pages]
            (rows, config.max_pages), PAD_PAGE, dtype=torch.int32, device=device
        )

    def admit(self, admissions: Sequence[SlotAdmission]) -> None:
        """Slots begin a new life, with ``cached_len`` places filled and no pages of their own."""
        if not admissions:
            return
        assert all(a.slot != PAD_SLOT for a in admissions), "the pad slot is never admitted"
        staged = [[a.slot for a in admissions], [a.cached_len for a in admissions]]
        slots, cached_len = upload(staged, torch.int64, self.device).unbind()
        self.seq_len[slots] = cached_len.to(torch.int32)
        self.next_token.index_fill_(0, slots, 0)
        self.draft_feature.index_fill_(0, slots, 0)
        self.page_table.index_fill_(0, slots, PAD_PAGE)

    def write_pages(self, writes: Sequence[PageWrite]) -> None:
        """All page-table writes of a step at once."""
        if not writes:
            return
        assert all(w.slot != PAD_SLOT for w in writes), "the pad slot has no pages of its own"
        num, width = len(writes), self.page_table.shape[1]
        lens = ints((len(w.pages) for w in writes), num)
        columns = ranges(ints((w.start for w in writes), num), lens)
        assert not len(columns) or columns.max() < width, "more pages than a slot has"
        places = np.repeat(ints((w.slot for w in writes), num) * width, lens) + columns
        pages = ints(chain.from_iterable(w.pages for w in writes), len(places))
        where, what = upload_all([places, pages], self.device)  # one copy for all
        self.page_table.view(-1).index_copy_(0, where, what.to(torch.int32))

    def advance(
        self,
        slots: torch.Tensor,  # [R] int64
        seq_len: torch.Tensor,  # [R] int64: L after the step
        next_token: torch.Tensor,  # [R] int64
        feature: torch.Tensor | None,  # [R, H_draft]; None without a drafter
    ) -> None:
        """What a step leaves behind. Rows of the pad slot write back what is there."""
        real = slots != PAD_SLOT
        self.seq_len[slots] = torch.where(real, seq_len.to(torch.int32), self.seq_len[slots])
        self.next_token[slots] = torch.where(real, next_token, self.next_token[slots])
        if feature is not None:
            self.draft_feature[slots] = torch.where(real[:, None], feature, self.draft_feature[slots])
