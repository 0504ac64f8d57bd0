"""Target, head and the fixed batch shape, put together: what training and evaluation both run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from attention import PackedMask
from head import DraftHead, Unroller
from packing import Batch
from target import Target
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Forward:
    hidden: Tensor  # [B * S, hidden] of the target, final-normed
    outputs: Iterator[Tensor]  # per step, normed output of the draft layer [B * S, hidden]


class Drafting:
    """One batch through the frozen target and the unrolled head."""

    def __init__(
        self, target: Target, head: DraftHead, draft_ids: Tensor, rows: int, row_len: int, compiled: bool
    ):
        self.target, self.head, self.draft_ids = target, head, draft_ids
        self.rows, self.row_len = rows, row_len
        self.dtype = target.weights.embedding.dtype
        self.mask = PackedMask(rows, row_len, str(draft_ids.device))
        self.unroller = Unroller(target.dims, target.cos, target.sin, compiled)

    def forward(self, batch: Batch) -> Forward:
        self.mask.update(batch.position)
        features, hidden = self.target.forward(batch.ids, batch.position, self.mask)
        embedding, cast = self.target.weights.embedding, self.head.cast(self.dtype)
        outputs = self.unroller.run(cast, embedding, batch.ids, batch.position, features, self.mask)
        return Forward(hidden.flatten(0, 1), outputs)

    def lm_head(self) -> Tensor:
        """[draft_vocab, hidden] in the computing type, without gradient."""
        return self.head.weights["lm_head"].detach().to(self.dtype)

    def draft_of(self) -> Tensor:
        """Target id -> draft id, or -1 [vocab]."""
        device = self.draft_ids.device
        inverse = torch.full((self.target.dims.vocab,), -1, dtype=torch.int64, device=device)
        inverse[self.draft_ids] = torch.arange(len(self.draft_ids), device=device)
        return inverse
