"""Attention over packed rows: several texts share a row, and none sees another.

On a GPU this is FlexAttention with a block mask made from the texts' starts; elsewhere a dense
reference that also serves the tests.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128
_flex = torch.compile(flex_attention, dynamic=False)


class PackedMask:
    """Causal within a text.  One object per batch shape: `update` refills its tensors in place.

    The mask function closes over one fixed tensor, so the compiled kernels never see a new one.
    """

    def __init__(self, rows: int, length: int, device: str):
        self.start = torch.zeros(rows, length, dtype=torch.int32, device=device)  # of each token's text
        self.fused = device.startswith("cuda")
        self.block: BlockMask | None = None
        self._index = torch.arange(length, device=device, dtype=torch.int32)

        def allowed(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv <= q) & (kv >= self_start[b, q])

        self_start = self.start
        self._allowed = allowed

    def update(self, position: Tensor) -> None:
        """position [rows, length]: place of every token in its own text."""
        self.start.copy_(self._index - position)
        if not self.fused:
            return
        rows, length = position.shape
        blocks = length // BLOCK
        first = self.start[:, ::BLOCK] // BLOCK  # [rows, blocks] first key block a query block needs
        query_block = torch.arange(blocks, device=position.device, dtype=torch.int32)
        count = query_block - first + 1
        index = (first[..., None] + query_block).clamp(max=blocks - 1)
        self.block = BlockMask.from_kv_blocks(
            count[:, None].to(torch.int32),
            index[:, None].to(torch.int32),
            BLOCK_SIZE=BLOCK,
            mask_mod=self._allowed,
            seq_lengths=(length, length),
        )

    def dense(self) -> Tensor:
        """[rows, 1, length, length] bool."""
        causal = self._index[None, :] <= self._index[:, None]
        return (causal & (self._index >= self.start[..., None]))[:, None]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> Tensor:
    """q [B, heads, S, D], k and v [B, kv_heads, S, D] -> [B, heads, S, D]."""
    if mask.fused:
        return _flex(q, k, v, block_mask=mask.block, enable_gqa=True)
    return _dense(q, k, v, mask)[0]


def attend_lse(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> tuple[Tensor, Tensor]:
    """As `attend`, with the log-sum-exp of the scores, float32 [B, heads, S]."""
    if mask.fused:
        wanted: Any = AuxRequest(lse=True)
        out, aux = _flex(q, k, v, block_mask=mask.block, enable_gqa=True, return_aux=wanted)
        return out, aux.lse
    return _dense(q, k, v, mask)


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: PackedMask) -> tuple[Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = (q.float() @ keys.float().transpose(-1, -2)) * q.shape[-1] ** -0.5
    score = score.masked_fill(~mask.dense(), float("-inf"))
    lse = torch.logsumexp(score, -1)
    return (torch.exp(score - lse[..., None]) @ values.float()).to(q.dtype), lse
