"""Activations of gated MLPs."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


def silu_and_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """``silu(gate) * up`` [T, F] of gate_up [T, 2 * F], gate first."""
    size = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], size) if out is None else out
    if gate_up.shape[0] == 0:
        return out
    if not use_kernel(gate_up):
        return silu_and_mul_ref(gate_up, out)
    silu_and_mul_launch(gate_up, out, pdl=pdl).run()
    return out


def silu_and_mul_ref(gate_up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return out.copy_(F.silu(gate).mul_(up))


def silu_and_mul_launch(gate_up: torch.Tensor, out: torch.Tensor, *, pdl: bool) -> Launch:
    from sgl_kernel.activation.kernels import silu_and_mul_kernel

    num_rows, size = out.shape
    assert gate_up.shape == (num_rows, 2 * size) and gate_up.stride(1) == out.stride(1) == 1
    block = min(1024, next_power_of_2(size))
    pdl = pdl and device_info(out.device).has_pdl
    return Launch(
        silu_and_mul_kernel,
        (num_rows, -(-size // block)),
        (gate_up, out, gate_up.stride(0), out.stride(0)),
        {"SIZE": size, "BLOCK": block, "PDL": pdl},
        num_warps=4,
        pdl=pdl,
    )
