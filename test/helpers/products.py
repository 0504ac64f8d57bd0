"""A layer's product whose heads are turned already: at position 0 the rotary embedding changes nothing."""

from __future__ import annotations

import torch

from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.layers.attention.heads import HeadProduct, Positions, Scope
from sglang.srt.layers.rope import Rope


def product_of(
    q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None, scope: Scope | None = None
) -> HeadProduct:
    """q: [T, nq, d]; k, v: [T, nkv, d] or None. Copied."""
    parts = [part for part in (q, k, v) if part is not None]
    rope = Rope(RopeConfig(theta=100.0), q.shape[2], 1, q.dtype, q.device)
    positions = Positions(rope, torch.zeros(q.shape[0], dtype=torch.int64))
    num_kv_heads = 0 if k is None else k.shape[1]
    qkv = torch.cat(parts, dim=1).flatten(1)
    return HeadProduct(qkv, q.shape[1], num_kv_heads, positions, scope=scope or Scope())
