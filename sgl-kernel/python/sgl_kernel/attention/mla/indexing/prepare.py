"""What stands between an indexer's products and its scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2

MAX_PDL_TOKENS: Final = 32
"""Up to so many tokens the launch overlaps with the kernel ahead."""
HEADS_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class KeyNorm:
    """A layer norm; not rounded."""

    weight: torch.Tensor  # [d] float32
    bias: torch.Tensor  # [d] float32
    eps: float


@dataclass(frozen=True, slots=True)
class Turn:
    """What is turned: the first r of d numbers, by the angles of each token."""

    cos: torch.Tensor  # [T, r] float32, both halves the same
    sin: torch.Tensor  # [T, r] float32, the first half negated
    interleaved: bool  # pairs lie side by side; turned ones lie r / 2 apart


def prepare_keys(k: torch.Tensor, norm: KeyNorm, turn: Turn) -> torch.Tensor:
    """k: [T, d], rows may lie apart -> [T, d], normed and turned: what a cache keeps."""
    return _prepare(None, None, k, norm, turn, 1.0)


def prepare_index(
    q: torch.Tensor, weights: torch.Tensor, k: torch.Tensor, norm: KeyNorm, turn: Turn, scale: float
) -> torch.Tensor:
    """Turn q [T, h, d] and multiply weights [T, h] (float32) with ``scale``, both in place; the rest as
    ``prepare_keys``. Numbers are rounded to their type after the norm and after the turn."""
    return _prepare(q, weights, k, norm, turn, scale)


def _prepare(
    q: torch.Tensor | None,
    weights: torch.Tensor | None,
    k: torch.Tensor,
    norm: KeyNorm,
    turn: Turn,
    scale: float,
) -> torch.Tensor:
    assert turn.cos.shape[0] == k.shape[0] and k.stride(1) == 1
    if not use_kernel(k):
        return prepare_ref(q, weights, k, norm, turn, scale)
    out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    if len(k):
        prepare_launch(q, weights, k, norm, turn, scale, out).run()
    return out


def prepare_ref(
    q: torch.Tensor | None,
    weights: torch.Tensor | None,
    k: torch.Tensor,
    norm: KeyNorm,
    turn: Turn,
    scale: float,
) -> torch.Tensor:
    if q is not None and weights is not None:
        q.copy_(_turned(q, turn))
        weights.mul_(scale)
    wide = k.to(norm.weight.dtype)
    normed = F.layer_norm(wide, norm.weight.shape, norm.weight, norm.bias, norm.eps).to(k.dtype)
    return _turned(normed[:, None], turn)[:, 0]


def _turned(x: torch.Tensor, turn: Turn) -> torch.Tensor:
    """x: [T, heads, d]"""
    size = turn.cos.shape[1]
    first = x[..., :size].to(turn.cos.dtype)
    if turn.interleaved:
        first = first.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    first = first * turn.cos[:, None] + first.roll(size // 2, dims=-1) * turn.sin[:, None]
    return torch.cat((first.to(x.dtype), x[..., size:]), dim=-1)


def prepare_launch(
    q: torch.Tensor | None,
    weights: torch.Tensor | None,
    k: torch.Tensor,
    norm: KeyNorm,
    turn: Turn,
    scale: float,
    out: torch.Tensor,
) -> Launch:
    from sgl_kernel.attention.mla.indexing.turning.kernels import index_kernel

    (num_tokens, dim), rope = k.shape, turn.cos.shape[1]
    num_heads = 0 if q is None else q.shape[1]
    assert q is None or q.stride()[1:] == (dim, 1)
    assert turn.cos.is_contiguous() and turn.sin.is_contiguous()
    blocks = -(-num_heads // HEADS_AT_ONCE)
    pdl = num_tokens <= MAX_PDL_TOKENS and device_info(k.device).has_pdl
    return Launch(
        index_kernel,
        (num_tokens * (blocks + 1),),
        (
            k if q is None else q, norm.weight if weights is None else weights, k, out, norm.weight,
            norm.bias, turn.cos, turn.sin, num_tokens, 0 if q is None else q.stride(0),
            0 if weights is None else weights.stride(0), k.stride(0), scale, norm.eps,
        ),
        {
            "HEADS": num_heads,
            "HEADS_PAD": next_power_of_2(max(1, num_heads)),
            "AT_ONCE": HEADS_AT_ONCE,
            "Q_BLOCKS": blocks,
            "D": dim,
            "BLOCK": next_power_of_2(dim),
            "ROPE": rope,
            "HALF": next_power_of_2(rope // 2),
            "INTERLEAVED": turn.interleaved,
            "PDL": pdl,
        },
        num_warps=2,
        pdl=pdl,
    )  # fmt: skip
