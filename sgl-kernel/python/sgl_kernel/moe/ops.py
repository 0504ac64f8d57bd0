"""A layer's experts: gate and up, their activation, down, and the weighted sum.

Launches whose shapes depend on the number of tokens alone, so a CUDA graph serves any routing: where the
pairs of tokens and experts lie by expert; gate, up and silu; down; the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sgl_kernel._dispatch import device_info, interpreting, use_kernel
from sgl_kernel.launch import Launch, compute_type, next_power_of_2
from sgl_kernel.moe.config import ExpertsConfig, ProductConfig, experts_config, pairs_config
from sgl_kernel.moe.grouping import num_blocks, sort_pairs
from sgl_kernel.moe.pairs import down_launch, gate_up_launch, pays
from sgl_kernel.moe.reference import fused_experts_ref
from sgl_kernel.moe.weights import FORMATS, PACKED, ExpertMatrix, Format

MAX_TOKENS: Final = 4096
"""Of one pass: what lies between the products is large (Kimi: 470 MB)."""
MAX_COUNTED: Final = 1024
"""Tokens whose pairs are put in order by counting, in the square of their number; more are sorted."""
MAX_FLOAT_PRODUCTS: Final = 64 * 2**20
"""Numbers that are kept in float32 until they are summed; more are rounded to x's type."""
MAX_COUNTERS: Final = 16384
BLOCK_FIELDS: Final = 3


def expert_counters(device: torch.device | str) -> torch.Tensor:
    """What programs that share a tile count in: zeros before and after every launch, so one for all layers.

    For launches of one stream; [MAX_COUNTERS] int32.
    """
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Routed:
    """The pairs of T tokens and their k experts, by expert; and x as its first product wants it."""

    # [B, 3] int32: expert (-1: nothing to do), pairs, place of the first
    blocks: torch.Tensor
    order: torch.Tensor  # [T * k] int32: which pair lies there
    x: torch.Tensor  # [T, K], or [T, K'] in the order of packed words, zeros past the last column
    top_k: int
    block_m: int


def fused_experts(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    *,
    base: torch.Tensor | None = None,
    config: ExpertsConfig | None = None,
    counters: torch.Tensor | None = None,
    pdl: bool = False,
    by_pair: bool | None = None,
    clamped: bool = False,
) -> torch.Tensor:
    """``base + sum over a token's experts of weight * down(silu(gate(x)) * up(x))``, [T, H] of x's type.

    x: [T, H], rows contiguous; weights: [T, k] float32; experts: [T, k] int64 or int32, no expert twice in a
    row, negative: none; gate_up: [E, 2 * I, H], gate first; down: [E, H, I]; base: [T, H], added. Sums are
    float32 and in a fixed order: a token's result does not depend on who is beside it but for the tile it
    is multiplied in. config: launch constants instead of the table's; counters: ``expert_counters``, None:
    made anew, which costs a launch; by_pair: whether each pair has a program of its own, None: where it pays;
    clamped: instead of silu, GPT-OSS's ``gate * sigmoid(1.702 gate) * (up + 1)`` of clamped gate and up.
    """
    _check(x, weights, experts, gate_up, down, base)
    if not use_kernel(x):
        return fused_experts_ref(x, weights, experts, gate_up, down, base, clamped)
    out = torch.empty(x.shape[0], down.rows, dtype=x.dtype, device=x.device)
    if by_pair if by_pair is not None else pays(x.shape[0], gate_up.num_experts, experts.shape[1]):
        _by_pair(x, weights, experts, gate_up, down, base, out, config, counters, pdl, clamped)
        return out
    for begin in range(0, x.shape[0], MAX_TOKENS):
        some = slice(begin, begin + MAX_TOKENS)
        own_base = None if base is None else base[some]
        _one_pass(
            x[some], weights[some], experts[some], gate_up, down, own_base, out[some], config, counters, pdl,
            clamped,
        )  # fmt: skip
    return out


def _by_pair(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    base: torch.Tensor | None,
    out: torch.Tensor,
    config: ExpertsConfig | None,
    counters: torch.Tensor | None,
    pdl: bool,
    clamped: bool,
) -> None:
    config = config or pairs_config(device_info(x.device), experts.shape[0], experts.shape[1], gate_up, down)
    hidden = torch.empty(experts.numel(), down.columns, dtype=x.dtype, device=x.device)
    counters = expert_counters(x.device) if counters is None else counters
    gate_up_launch(x, experts, gate_up, hidden, config, counters, pdl, clamped).run()
    down_launch(hidden, weights, experts, down, base, out, config, counters, pdl).run()


def _one_pass(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    base: torch.Tensor | None,
    out: torch.Tensor,
    config: ExpertsConfig | None,
    counters: torch.Tensor | None,
    pdl: bool,
    clamped: bool,
) -> None:
    num_tokens, top_k = experts.shape
    config = config or experts_config(device_info(x.device), num_tokens, top_k, gate_up, down)
    routed = make_routed(x, experts, gate_up, config)
    hidden = make_hidden(routed, x.dtype, down, config)
    size = num_tokens * top_k * down.rows
    dtype = torch.float32 if size <= MAX_FLOAT_PRODUCTS else x.dtype
    products = torch.empty(num_tokens * top_k, down.rows, dtype=dtype, device=x.device)
    if counters is None and max(config.gate_up.split, config.down.split) > 1:
        counters = expert_counters(x.device)
    words = config.down.width if down.format in PACKED else 0
    if num_tokens <= MAX_COUNTED:
        route_launch(x, experts, routed, gate_up, config, pdl).run()
    else:
        sort_pairs(experts, gate_up.num_experts, config.block_m, routed.blocks, routed.order)
        if routed.x is not x:
            interleave_launch(x, routed, gate_up, config, pdl).run()
    for launch in (
        product_launch(
            routed.x, gate_up, routed, hidden, config, counters, pdl, gated=True, out_words=words,
            clamped=clamped,
        ),
        product_launch(hidden, down, routed, products, config, counters, pdl, gated=False),
        combine_launch(products, weights, experts, base, out, pdl),
    ):  # fmt: skip
        launch.run()


def _check(
    x: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
    base: torch.Tensor | None,
) -> None:
    assert weights.shape == experts.shape and experts.shape[0] == x.shape[0]
    assert x.shape[1] == gate_up.columns == down.rows and gate_up.rows == 2 * down.columns
    assert x.stride(1) == 1 and weights.is_contiguous() and experts.is_contiguous()
    assert gate_up.num_experts == down.num_experts and (base is None or base.shape == x.shape)


def padded_columns(matrix: ExpertMatrix, config: ProductConfig) -> int:
    """Of a row of the other factor: whole passes of packed words."""
    if matrix.format not in PACKED:
        return matrix.columns
    return -(-matrix.columns // (8 * config.width)) * 8 * config.width


def make_routed(
    x: torch.Tensor, experts: torch.Tensor, gate_up: ExpertMatrix, config: ExpertsConfig
) -> Routed:
    """Buffers, which ``route_launch`` fills."""
    ordered = x
    if gate_up.format in PACKED:
        ordered = x.new_empty(x.shape[0], padded_columns(gate_up, config.gate_up))
    num_pairs = experts.numel()
    most = num_blocks(num_pairs, gate_up.num_experts, config.block_m)
    fields = (min(num_pairs, most), BLOCK_FIELDS)
    if experts.shape[0] > MAX_COUNTED:
        fields = (most, BLOCK_FIELDS)
    blocks = torch.empty(fields, dtype=torch.int32, device=x.device)
    if num_pairs > most:  # compact, and not every number is given
        blocks.fill_(-1)
    order = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    return Routed(blocks, order, ordered, experts.shape[1], config.block_m)


def make_hidden(
    routed: Routed, dtype: torch.dtype, down: ExpertMatrix, config: ExpertsConfig
) -> torch.Tensor:
    """[T * k, I'], by place; what is past the last column stays zero."""
    width = padded_columns(down, config.down)
    make = torch.empty if width == down.columns else torch.zeros
    return make(routed.order.shape[0], width, dtype=dtype, device=routed.order.device)


def route_launch(
    x: torch.Tensor,
    experts: torch.Tensor,
    routed: Routed,
    gate_up: ExpertMatrix,
    config: ExpertsConfig,
    pdl: bool,
) -> Launch:
    from sgl_kernel.moe.routing.kernels import route_kernel

    num_tokens, top_k = experts.shape
    return Launch(
        route_kernel,
        (num_tokens,),
        (
            experts, routed.blocks, routed.order, x, routed.x, experts.numel(), x.stride(0),
            routed.x.stride(0),
        ),
        {
            "TOP_K": top_k,
            "SLOTS": next_power_of_2(top_k),
            "BM": config.block_m,
            "COMPACT": routed.blocks.shape[0] < experts.numel(),
            "CHUNK": min(256, next_power_of_2(max(16, experts.numel()))),
            "COLUMNS": gate_up.columns,
            "WORDS": config.gate_up.width if gate_up.format in PACKED else 0,
            "BLOCK": 1024,
            "PDL": pdl,
        },
        num_warps=4,
        pdl=pdl,
    )  # fmt: skip


def interleave_launch(
    x: torch.Tensor, routed: Routed, gate_up: ExpertMatrix, config: ExpertsConfig, pdl: bool
) -> Launch:
    from sgl_kernel.moe.routing.kernels import interleave_kernel

    return Launch(
        interleave_kernel,
        (x.shape[0],),
        (x, routed.x, x.stride(0), routed.x.stride(0)),
        {"COLUMNS": gate_up.columns, "WORDS": config.gate_up.width, "BLOCK": 1024, "PDL": pdl},
        num_warps=4,
        pdl=pdl,
    )


def product_launch(
    x: torch.Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    out: torch.Tensor,
    config: ExpertsConfig,
    counters: torch.Tensor | None,
    pdl: bool,
    *,
    gated: bool,
    out_words: int = 0,
    clamped: bool = False,
) -> Launch:
    """gated: x by token -> out by place, [pairs, I']; else x by place -> out by pair, [pairs, H] float32.

    out_words: the product after this one takes so many packed words a pass, and wants columns in their order.
    """
    from sgl_kernel.moe.products.kernels import expert_kernel

    own = config.gate_up if gated else config.down
    rows = matrix.rows // 2 if gated else matrix.rows
    num_pairs, blocks, tiles = routed.order.shape[0], routed.blocks.shape[0], -(-rows // own.block_n)
    if own.row_tiles > 1 and not gated and matrix.format in PACKED and 8 * own.width >= matrix.columns:
        return _rows_launch(x, matrix, routed, out, own, pdl)
    part = counted = routed.order  # not read
    if own.split > 1:
        assert counters is not None and blocks * tiles <= MAX_COUNTERS
        part = torch.empty(own.split, num_pairs, matrix.rows, dtype=torch.float32, device=x.device)
        counted = counters
    whole = matrix.global_scale
    if matrix.format is Format.FP8:
        blocks_of_part = -(-rows // matrix.block[0])
        assert matrix.scale is not None and matrix.scale.shape[1] == blocks_of_part * (2 if gated else 1)
    return Launch(
        expert_kernel,
        (tiles, blocks, own.split),
        (
            x, matrix.data, matrix.data if matrix.scale is None else matrix.scale,
            matrix.data if whole is None else whole, matrix.data if matrix.bias is None else matrix.bias,
            routed.blocks, routed.order, out, part, counted, num_pairs, x.stride(0),
        ),
        {
            "N": rows,
            "K": matrix.columns,
            "TOP_K": routed.top_k,
            "OUT_WIDTH": out.shape[1],
            "OUT_WORDS": out_words,
            "FORMAT": FORMATS[matrix.format],
            "PARTS": 0 if whole is None else whole.shape[1],
            "SCALE_ROWS": max(1, matrix.block[0]),
            "SCALE_COLUMNS": max(1, matrix.block[1]),
            "BIAS": matrix.bias is not None,
            "GATED": gated,
            "CLAMPED": clamped,
            "BM": routed.block_m,
            "BN": own.block_n,
            "WORDS": own.width,
            "CHUNK": own.chunk(matrix),
            "SPLIT": own.split,
            "STAGES": own.num_stages,
            "PAIRS": own.pairs and x.dtype == torch.bfloat16 and not interpreting(),
            "CT": compute_type(x.dtype),
            "PDL": pdl,
        },
        num_warps=own.num_warps,
        num_stages=own.num_stages,
        # Left to itself ptxas spills 8 bytes of MXFP4's on sm_90, to reach five programs a SM.
        max_registers=128 if matrix.format is Format.MXFP4 and not gated else None,
        pdl=pdl,
    )  # fmt: skip


def _rows_launch(
    x: torch.Tensor,
    matrix: ExpertMatrix,
    routed: Routed,
    out: torch.Tensor,
    own: ProductConfig,
    pdl: bool,
) -> Launch:
    """As ``product_launch`` of packed words in one pass, several tiles of rows a program."""
    from sgl_kernel.moe.products.kernels import rows_kernel

    whole, scale = matrix.global_scale, matrix.scale
    assert scale is not None and out.shape[1] == matrix.rows
    return Launch(
        rows_kernel,
        (-(-matrix.rows // (own.block_n * own.row_tiles)), routed.blocks.shape[0]),
        (
            x, matrix.data, scale, scale if whole is None else whole,
            scale if matrix.bias is None else matrix.bias, routed.blocks, routed.order, out, x.stride(0),
        ),
        {
            "N": matrix.rows,
            "K": matrix.columns,
            "FORMAT": FORMATS[matrix.format],
            "PARTS": 0 if whole is None else whole.shape[1],
            "BIAS": matrix.bias is not None,
            "BM": routed.block_m,
            "BN": own.block_n,
            "WORDS": own.width,
            "ROW_TILES": own.row_tiles,
            "STAGES": own.num_stages,
            "PAIRS": own.pairs and x.dtype == torch.bfloat16 and not interpreting(),
            "CT": compute_type(x.dtype),
            "PDL": pdl,
        },
        num_warps=own.num_warps,
        num_stages=own.num_stages,
        pdl=pdl,
    )  # fmt: skip


def combine_launch(
    products: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    base: torch.Tensor | None,
    out: torch.Tensor,
    pdl: bool,
) -> Launch:
    from sgl_kernel.moe.combining.kernels import combine_kernel

    num_tokens, width = out.shape
    block = min(1024, next_power_of_2(width))
    base_stride = 0 if base is None else base.stride(0)
    return Launch(
        combine_kernel,
        (num_tokens, -(-width // block)),
        (products, weights, experts, weights if base is None else base, out, base_stride),
        {"N": width, "TOP_K": experts.shape[1], "BLOCK": block, "BASE": base is not None, "PDL": pdl},
        num_warps=4,
        pdl=pdl,
    )
