"""What a layer of experts means, in plain PyTorch: dequantise and multiply."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel.moe.weights import ExpertMatrix


def fused_experts_ref(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    base: torch.Tensor | None,
    clamped: bool = False,
) -> torch.Tensor:
    """As ``fused_experts``, an expert at a time, in float64 for float64 inputs and float32 otherwise.

    Weights are what a model in x's type would hold; so is what goes from gate and up to down.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    out = torch.zeros(x.shape[0], down.rows, dtype=wide, device=x.device)
    for expert in experts[experts >= 0].unique().tolist():
        tokens, slots = (experts == expert).nonzero(as_tuple=True)
        gate, up = _product(x[tokens].to(wide), gate_up, expert, x.dtype).chunk(2, dim=1)
        hidden = (clamped_swiglu(gate, up) if clamped else F.silu(gate) * up).to(x.dtype).to(wide)
        own = _product(hidden, down, expert, x.dtype)
        out.index_add_(0, tokens, own * weights[tokens, slots, None].to(wide))
    if base is not None:
        out += base
    return out.to(x.dtype)


def _product(x: torch.Tensor, matrix: ExpertMatrix, expert: int, dtype: torch.dtype) -> torch.Tensor:
    """x: [T, K] -> [T, N], of weights as a model in ``dtype`` would hold them."""
    bias = None if matrix.bias is None else matrix.bias[expert].to(x.dtype)
    return F.linear(x, matrix.dequantise(expert, dtype).to(x.dtype), bias)


def clamped_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * (1.702 * gate).sigmoid() * (up + 1)


def route_ref(experts: torch.Tensor, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """blocks [pairs, 3] and order [pairs], int32, as ``route_kernel`` makes them if not COMPACT."""
    flat = experts.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda pair: (flat[pair] < 0, flat[pair], pair))
    blocks = []
    for place, pair in enumerate(order):
        run = [p for p in order if flat[p] == flat[pair]]
        index = place - order.index(run[0])
        begins = flat[pair] >= 0 and index % block_m == 0
        blocks.append([flat[pair] if begins else -1, min(len(run) - index, block_m), place])
    return torch.tensor(blocks, dtype=torch.int32), torch.tensor(order, dtype=torch.int32)
