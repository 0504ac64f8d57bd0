"""A layer's experts for few tokens: gate and up with their activation; down with the weighted sum."""

from __future__ import annotations

from typing import Any, Final

import torch

from sgl_kernel._dispatch import interpreting
from sgl_kernel.launch import Launch, compute_type
from sgl_kernel.moe.config import ExpertsConfig, ProductConfig
from sgl_kernel.moe.weights import FORMATS, PACKED, ExpertMatrix

MOST_TOKENS: Final = 2
MOST_REGISTERS: Final = 168
"""Three programs of four warps a SM; left to itself ptxas stops at 128 and spills."""


def gate_up_launch(
    x: torch.Tensor,
    experts: torch.Tensor,
    matrix: ExpertMatrix,
    hidden: torch.Tensor,
    config: ExpertsConfig,
    counters: torch.Tensor,
    pdl: bool,
    clamped: bool = False,
) -> Launch:
    """x: [T, H], experts: [T, k] -> hidden: [T * k, I], by pair."""
    from sgl_kernel.moe.pairing.kernels import pair_gate_up_kernel

    own, rows, num_pairs = config.gate_up, matrix.rows // 2, experts.numel()
    tiles = -(-rows // own.block_n)
    part = hidden  # not read
    if own.split > 1:
        assert num_pairs * tiles <= len(counters)
        part = torch.empty(own.split, num_pairs, matrix.rows, dtype=torch.float32, device=x.device)
    return Launch(
        pair_gate_up_kernel,
        (tiles, num_pairs, own.split),
        (x, *_tensors(matrix), experts, hidden, part, counters, num_pairs, x.stride(0)),
        {
            **_constants(x, matrix, own, rows),
            "TOP_K": experts.shape[1],
            "CLAMPED": clamped,
            "CHUNK": own.chunk(matrix),
            "SPLIT": own.split,
            "PDL": pdl,
        },
        num_warps=own.num_warps,
        num_stages=own.num_stages,
        max_registers=MOST_REGISTERS,
        pdl=pdl,
    )


def down_launch(
    hidden: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    matrix: ExpertMatrix,
    base: torch.Tensor | None,
    out: torch.Tensor,
    config: ExpertsConfig,
    counters: torch.Tensor,
    pdl: bool,
) -> Launch:
    """hidden: [T * k, I], weights and experts: [T, k] -> out: [T, H]. The split of columns is not used."""
    from sgl_kernel.moe.pairing.kernels import pair_down_kernel

    own, rows, (num_tokens, top_k) = config.down, matrix.rows, experts.shape
    tiles = -(-rows // own.block_n)
    assert num_tokens * tiles <= len(counters)
    products = torch.empty(num_tokens * top_k, rows, dtype=torch.float32, device=hidden.device)
    return Launch(
        pair_down_kernel,
        (tiles, num_tokens * top_k),
        (
            hidden, *_tensors(matrix), experts, weights, out if base is None else base, products, counters,
            out, 0 if base is None else base.stride(0),
        ),
        {
            **_constants(hidden, matrix, own, rows),
            "TOP_K": top_k,
            "BASE": base is not None,
            "AHEAD": matrix.format in PACKED and 8 * own.width >= matrix.columns,
            "PDL": pdl,
        },
        num_warps=own.num_warps,
        num_stages=own.num_stages,
        pdl=pdl,
    )  # fmt: skip


def _tensors(matrix: ExpertMatrix) -> tuple[torch.Tensor, ...]:
    """Weights, scales, scales of whole matrices, biases; the weights where there are none, which is not
    read."""
    others = (matrix.scale, matrix.global_scale, matrix.bias)
    return matrix.data, *(matrix.data if other is None else other for other in others)


def _constants(x: torch.Tensor, matrix: ExpertMatrix, own: ProductConfig, rows: int) -> dict[str, Any]:
    return {
        "N": rows,
        "K": matrix.columns,
        "FORMAT": FORMATS[matrix.format],
        "PARTS": 0 if matrix.global_scale is None else matrix.global_scale.shape[1],
        "SCALE_ROWS": max(1, matrix.block[0]),
        "SCALE_COLUMNS": max(1, matrix.block[1]),
        "BIAS": matrix.bias is not None,
        "BN": own.block_n,
        "WORDS": own.width,
        "STAGES": own.num_stages,
        "PAIRS": own.pairs and x.dtype == torch.bfloat16 and not interpreting(),
        "CT": compute_type(x.dtype),
    }


def pays(num_tokens: int, num_experts: int, top_k: int) -> bool:
    """Whether few tokens share an expert, so that little is read twice."""
    return num_tokens <= MOST_TOKENS and num_tokens * top_k <= num_experts
