"""Counter-based Gumbel noise: a pure function of (seed, index of the token, token id).

The target and the drafter draw the same noise at the same place, so at temperature T > 0 both
choose ``argmax(logits / T + noise)`` and agree often.  The smallest u make the largest noise, so
``-log1p(-u)`` keeps the rare winners at full resolution; u that rounds to 1 gives -inf, a loser.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
SEED_MUL, INDEX_MUL, TOKEN_MUL, OFFSET = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x165667B1
MIX = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


def hash32(seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
    """32 random bits (as int64) for every broadcast element of the three int64 tensors."""
    bits = (seed * SEED_MUL + index * INDEX_MUL + OFFSET) & _MASK
    bits = ((bits ^ (bits >> 15)) * TOKEN_MUL + token * INDEX_MUL) & _MASK
    for shift, multiplier in MIX:
        bits = ((bits ^ (bits >> shift)) * multiplier) & _MASK
    return bits ^ (bits >> 16)


def gumbel(seed: Tensor, index: Tensor, token: Tensor) -> Tensor:
    """Standard Gumbel noise in float32."""
    u = (hash32(seed, index, token).float() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-u))
