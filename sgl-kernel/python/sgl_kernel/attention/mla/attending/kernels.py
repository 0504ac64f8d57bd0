"""One layer's latent attention in Triton, by a plan of ``attention.decode``.

Rows of a tile are (query, head) pairs: all heads share one key of R + r numbers, whose first R are the value.
So a block of the cache is loaded once and multiplied twice.
"""

import triton
import triton.language as tl

from sgl_kernel.attention.decode.kernels import place_offset, row_places, seen_by, tree_words
from sgl_kernel.attention.decode.merging.kernels import merge_levels
from sgl_kernel.attention.decode.planning.kernels import ITEM_FIELDS
from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def _as(x, CT: tl.constexpr):
    """In the type that is multiplied, saturated where that is float16."""
    if x.dtype == tl.bfloat16 and tl.float16 == CT:
        x = x.to(tl.float32)
        x = tl.where(x > 65504.0, 65504.0, tl.where(x < -65504.0, -65504.0, x))  # NaN stays
    return x.to(CT)


@triton.jit
def _wide(x, CT: tl.constexpr):
    """A block of the cache in the type that is multiplied, exactly.

    e4m3 by an instruction that Triton does not know as a conversion. One that it knows is made in the layouts
    of the operands, of each product apart, on bytes that lie scattered there, and no block is on its way
    meanwhile.
    """
    if x.dtype == tl.float8e4nv and tl.float16 == CT:
        return tl.inline_asm_elementwise(
            "{.reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;}",
            "=r,=r,r", [x], dtype=tl.float16, is_pure=False, pack=4,
        )  # fmt: skip
    return x.to(CT)


@triton.jit
def _attend_chunk(
    queries, ropes, latents, pages, place, begin, end, base, row, query, low, high, scale, rope_scale,
    scratch_offset, scratch_cap, d, r,
    R: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, CAUSAL: tl.constexpr, WORDS: tl.constexpr,
    SCRATCH: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Attend places begin … end - 1. queries: [BM, BD]; ropes: [BM, BR]; place: [BN], of the first block."""
    BM: tl.constexpr = queries.shape[0]
    nn = tl.arange(0, BN)
    top = tl.full([BM], -1e30, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, d.shape[0]], tl.float32)
    for n0 in tl.range(begin, end, BN, num_stages=STAGES):
        n = n0 + nn
        rows = latents + place_offset(place, scratch_offset, R + ROPE, SCRATCH)[:, None]
        place = row_places(pages, n + BN, end, base, row, scratch_cap, PAGE, SCRATCH)
        there = (n < end)[:, None]
        keys = _wide(tl.load(rows + d[None, :], mask=there & (d < R)[None, :], other=0.0), CT)
        turned = _wide(tl.load(rows + R + r[None, :], mask=there & (r < ROPE)[None, :], other=0.0), CT)
        scores = tl.dot(ropes, tl.trans(turned), input_precision="ieee") * rope_scale
        scores += tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(seen_by(n, end, base, query, low, high, CAUSAL, WORDS), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        mine = tl.exp2(top - new_top)
        norm = norm * mine + tl.sum(weights, 1)
        acc = tl.dot(weights.to(CT), keys, acc * mine[:, None], input_precision="ieee")
        top = new_top
    return acc, top, norm


@triton.jit
def latent_kernel(
    q, out, latents, items, base_lens, bits, page_table, kv_scale, partial, sums, counters,
    scale, q_stride, table_stride, num_partials, scratch_offset: tl.int64, scratch_cap,
    Q: tl.constexpr, HEADS: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr,
    EXTRA: tl.constexpr, CAUSAL: tl.constexpr, WORDS: tl.constexpr, SCRATCH: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr,
    STAGES: tl.constexpr, FAN_IN: tl.constexpr, AT_ONCE: tl.constexpr, CT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, i) attends tile rows b * BM … of item i. The last one of a row merges."""
    begin_dependent(PDL)
    fields = items + tl.program_id(1) * ITEM_FIELDS
    row = tl.load(fields)
    begin = tl.load(fields + 2)
    planned_end = tl.load(fields + 3)
    slot = tl.load(fields + 4)
    if row < 0:
        return
    base = tl.load(base_lens + row).to(tl.int32)
    end = tl.minimum(planned_end, base + EXTRA)  # a plan may have been made for longer rows
    pages = page_table + slot.to(tl.int64) * table_stride
    place = row_places(pages, begin + tl.arange(0, BN), planned_end, base, row, scratch_cap, PAGE, SCRATCH)

    M: tl.constexpr = Q * HEADS
    m = tl.program_id(0) * BM + tl.arange(0, BM)
    query = m // HEADS
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    token = row * Q + query
    q_rows = q + token.to(tl.int64)[:, None] * q_stride + ((m % HEADS) * (R + ROPE))[:, None]
    inside = (m < M)[:, None] & (d < R)[None, :]
    queries = _as(tl.load(q_rows + d[None, :], mask=inside, other=0.0), CT)
    turned = (m < M)[:, None] & (r < ROPE)[None, :]
    ropes = _as(tl.load(q_rows + R + r[None, :], mask=turned, other=0.0), CT)
    low, high = tree_words(bits, token, m < M, WORDS)
    rope_scale = scale
    value_scale = 1.0
    if SCALED:
        value_scale = tl.load(kv_scale)
        rope_scale = scale * tl.load(kv_scale + 1)
        scale *= value_scale

    acc, top, norm = _attend_chunk(
        queries, ropes, latents, pages, place, begin, end, base, row, query, low, high, scale, rope_scale,
        scratch_offset, scratch_cap, d, r, R, ROPE, PAGE, CAUSAL, WORDS, SCRATCH, BN, STAGES, CT,
    )  # fmt: skip
    acc, top, norm, complete = merge_levels(
        partial, sums, counters + tl.program_id(0) * num_partials, fields, acc, top, norm, m, d, M, R,
        FAN_IN, AT_ONCE,
    )  # fmt: skip
    if complete:
        # A row that sees nothing (padding) has a norm of 0 and gives 0.
        result = acc * (value_scale / tl.where(norm == 0.0, 1.0, norm))[:, None]
        out_at = (token.to(tl.int64) * HEADS + m % HEADS)[:, None] * R + d[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=inside)
