"""Activations of gated MLPs."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

SWIGLU_ALPHA: Final = 1.702
SWIGLU_LIMIT: Final = 7.0


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up: [..., 2 * size] (gate first) -> ``silu(gate) * up`` [..., size]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def clamped_swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: gate_up [..., 2 * size] (gate first), clamped; ``gate * sigmoid(1.702 gate) * (up + 1)``."""
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=SWIGLU_LIMIT), up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return (up + 1) * (gate * (SWIGLU_ALPHA * gate).sigmoid())
