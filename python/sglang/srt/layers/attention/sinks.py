"""Attention sinks: beside its keys a query sees one place whose score is a constant of its head.

It takes its part of the softmax and gives nothing. Here it becomes a real key, so that any attention
will do: queries get one more dimension, which holds the score, and of all keys only the sink's has
something there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_with_sinks(
    q: torch.Tensor,  # [B, heads, Q, d]
    k: torch.Tensor,  # [B, heads or 1, W, d]
    v: torch.Tensor,  # [B, heads or 1, W, d]
    mask: torch.Tensor,  # [..., Q, W], added to the scores
    sinks: torch.Tensor,  # [..., heads, Q] scores
) -> torch.Tensor:
    """[B, heads, Q, d]"""
    scale = q.shape[-1] ** -0.5
    score = (sinks / scale).to(q.dtype)[..., None].expand(*q.shape[:-1], 1)
    k, v = F.pad(k, (0, 1, 0, 1)), F.pad(v, (0, 1, 0, 1))  # [B, heads or 1, W + 1, d + 1]
    k[..., -1, -1] = 1.0
    k, v = k.expand(*q.shape[:2], -1, -1), v.expand(*q.shape[:2], -1, -1)
    mask = F.pad(mask, (0, 1))  # every query sees it
    out = F.scaled_dot_product_attention(torch.cat((q, score), -1), k, v, attn_mask=mask, scale=scale)
    return out[..., :-1]
