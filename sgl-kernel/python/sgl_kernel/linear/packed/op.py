"""Products with a matrix that stays as a checkpoint packs it: those of one expert that gets all rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.activation.ops import silu_and_mul
from sgl_kernel.launch import Launch
from sgl_kernel.moe.config import ExpertsConfig, one_matrix_config
from sgl_kernel.moe.ops import (
    FORMATS,
    Routed,
    expert_counters,
    interleave_launch,
    padded_columns,
    product_launch,
)
from sgl_kernel.moe.weights import PACKED, ExpertMatrix, Format

MAX_PACKED_ROWS: Final = 64
"""Rows that are multiplied with packed weights; for more they are unpacked, once, for the library."""


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """One matrix, with what its launches read beside it."""

    matrix: ExpertMatrix  # E = 1
    parts: int  # 2: gate and up, whose scales of the whole or blocks of rows are counted apart
    blocks: torch.Tensor  # [MAX_PACKED_ROWS + 1, 3] int32: all of so many rows, as one block of work
    order: torch.Tensor  # [MAX_PACKED_ROWS] int32: 0, 1, …
    counters: torch.Tensor

    @classmethod
    def make(cls, matrix: ExpertMatrix) -> PackedMatrix:
        assert matrix.num_experts == 1 and matrix.format is not Format.PLAIN and matrix.scale is not None
        parts = matrix.parts if matrix.global_scale is None else matrix.global_scale.shape[1]
        device = matrix.data.device
        blocks = torch.zeros(MAX_PACKED_ROWS + 1, 3, dtype=torch.int32, device=device)
        blocks[:, 1] = torch.arange(MAX_PACKED_ROWS + 1, device=device)
        order = torch.arange(MAX_PACKED_ROWS, dtype=torch.int32, device=device)
        return cls(matrix, parts, blocks, order, expert_counters(device))


def packed_linear(
    x: torch.Tensor, weight: PackedMatrix, *, gated: bool = False, pdl: bool = False
) -> torch.Tensor:
    """``x @ W^T`` [T, N] of x's type, or with ``gated`` ``silu(x @ gate^T) * (x @ up^T)`` [T, N / 2].

    x: [T, K], rows may lie apart. Sums are float32.
    """
    if not use_kernel(x):
        return packed_linear_ref(x, weight.matrix, gated)
    num_rows, matrix = x.shape[0], weight.matrix
    if num_rows > MAX_PACKED_ROWS or (weight.parts > 1 and not gated):
        out = torch.mm(x, dequantised(weight, x.dtype).t())
        return silu_and_mul(out, pdl=pdl) if gated else out
    out = torch.empty(num_rows, matrix.rows // (2 if gated else 1), dtype=x.dtype, device=x.device)
    if num_rows:
        for launch in packed_launches(x, weight, out, gated, pdl):
            launch.run()
    return out


def packed_linear_ref(x: torch.Tensor, matrix: ExpertMatrix, gated: bool) -> torch.Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    out = F.linear(x.to(wide), matrix.dequantise(0, x.dtype).to(wide))
    if gated:
        gate, up = out.chunk(2, dim=1)
        out = F.silu(gate) * up
    return out.to(x.dtype)


def packed_launches(
    x: torch.Tensor, weight: PackedMatrix, out: torch.Tensor, gated: bool, pdl: bool
) -> list[Launch]:
    """x in the order of packed words, where there are any; the product."""
    num_rows, matrix = x.shape[0], weight.matrix
    own = one_matrix_config(device_info(x.device), num_rows, matrix, 2 if gated else 1)
    block_m = max(8, 1 << (num_rows - 1).bit_length())
    config = ExpertsConfig(block_m, own, own)
    is_packed = matrix.format in PACKED
    ordered = x.new_empty(num_rows, padded_columns(matrix, own)) if is_packed else x
    blocks = weight.blocks[num_rows : num_rows + 1]
    routed = Routed(blocks, weight.order[:num_rows], ordered, 1, block_m)
    product = product_launch(ordered, matrix, routed, out, config, weight.counters, pdl, gated=gated)
    return [interleave_launch(x, routed, matrix, config, pdl), product] if is_packed else [product]


def dequantised(weight: PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """[N, K]"""
    matrix = weight.matrix
    out = torch.empty(matrix.rows, matrix.columns, dtype=dtype, device=matrix.data.device)
    dequantise_launch(weight, out).run()
    return out


def dequantise_launch(weight: PackedMatrix, out: torch.Tensor) -> Launch:
    from sgl_kernel.linear.packed.kernels import dequantise_kernel

    matrix = weight.matrix
    scale, whole = matrix.scale, matrix.global_scale
    assert scale is not None
    rows, columns = out.shape
    return Launch(
        dequantise_kernel,
        (rows, -(-columns // 1024)),
        (matrix.data, scale, scale if whole is None else whole, out, rows),
        {
            "K": columns,
            "FORMAT": FORMATS[matrix.format],
            "PARTS": weight.parts,
            "SCALE_ROWS": max(1, matrix.block[0]),
            "SCALE_COLUMNS": max(1, matrix.block[1]),
            "BLOCK": 1024,
        },
        num_warps=4,
    )
