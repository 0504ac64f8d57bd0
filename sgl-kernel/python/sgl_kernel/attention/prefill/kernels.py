"""Prefill attention in Triton: chunks of different lengths over a paged cache, causal.

Rows of a tile are (query, head of the group) pairs of one KV head, as in decode attention.
"""

import triton
import triton.language as tl

from sgl_kernel.attention.decode.kernels import add_sinks
from sgl_kernel.common.kernels import begin_dependent

TILE_FIELDS = tl.constexpr(8)  # slot, places before the chunk, its first token, its length, first tile row


@triton.jit
def _places(pages, n, end, PAGE: tl.constexpr):
    return tl.load(pages + n // PAGE, mask=n < end, other=0) * PAGE + n % PAGE


@triton.jit
def _load(pointers, n, d, end, D: tl.constexpr, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=(n < end)[:, None] & (d < D)[None, :], other=0.0)
    elif d.shape[0] != D:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend(
    queries, acc, top, norm, heads_kv, pages, begin, end, seen_to, scale,
    D: tl.constexpr, STRIDE: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Go on over places begin … end - 1; if MASKED row m sees those up to seen_to[m], with a WINDOW the
    last so many of them; else all."""
    d = tl.arange(0, BD)
    nn = tl.arange(0, BN)
    place = _places(pages, begin + nn, end, PAGE)  # a block ahead, as in decode attention
    for n0 in tl.range(begin, end, BN, num_stages=STAGES):
        n = n0 + nn
        at = (place.to(tl.int64) * STRIDE)[:, None] + d[None, :]
        place = _places(pages, n + BN, end, PAGE)
        keys = _load(heads_kv + at, n, d, end, D, MASKED).to(CT)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        if MASKED:
            seen = (n[None, :] <= seen_to[:, None]) & (n < end)[None, :]
            if WINDOW > 0:
                seen = seen & (n[None, :] > seen_to[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        mine = tl.exp2(top - new_top)
        norm = norm * mine + tl.sum(weights, 1)
        values = _load(heads_kv + D + at, n, d, end, D, MASKED).to(CT)
        acc = tl.dot(weights.to(CT), values, acc * mine[:, None], input_precision="ieee")
        top = new_top
    return acc, top, norm


@triton.jit
def prefill_kernel(
    q, out, kv, tiles, page_table, kv_scale, sinks, scale, q_stride, table_stride,
    G: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SCALED: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, CT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, h) attends tile i for KV head h."""
    begin_dependent(PDL)
    tile = tiles + tl.program_id(0) * TILE_FIELDS
    head = tl.program_id(1)
    slot = tl.load(tile)
    start = tl.load(tile + 1)
    first_token = tl.load(tile + 2)
    length = tl.load(tile + 3)
    first_row = tl.load(tile + 4)

    m = first_row + tl.arange(0, BM)
    query = m // G
    d = tl.arange(0, BD)
    inside = (m < length * G)[:, None] & (d < D)[None, :]
    token = (first_token + query).to(tl.int64)
    column = ((head * G + m % G) * D)[:, None] + d[None, :]
    queries = tl.load(q + token[:, None] * q_stride + column, mask=inside, other=0.0).to(CT)
    value_scale = 1.0
    if SCALED:
        scale *= tl.load(kv_scale + head * 2)
        value_scale = tl.load(kv_scale + head * 2 + 1)

    pages = page_table + slot.to(tl.int64) * table_stride
    heads_kv = kv + head * 2 * D
    end = start + tl.minimum(length, (first_row + BM - 1) // G + 1)
    # Places up to that of the tile's first query are seen by all rows: whole blocks need no mask.
    full = (start + first_row // G + 1) // BN * BN
    seen_to = start + query
    top = tl.full([BM], -1e30, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    STRIDE: tl.constexpr = NKV * 2 * D
    begin = 0
    if WINDOW > 0:
        # Blocks before the first query's window are left out; those that the last one's window begins in,
        # or after, are seen by some rows alone.
        outside = tl.maximum(start + first_row // G + 1 - WINDOW, 0) // BN * BN
        begin = tl.maximum(tl.cdiv(end - WINDOW, BN) * BN, outside)
        acc, top, norm = _attend(
            queries, acc, top, norm, heads_kv, pages, outside, tl.minimum(begin, full), seen_to, scale,
            D, STRIDE, PAGE, BN, BD, STAGES, True, WINDOW, CT,
        )  # fmt: skip
    acc, top, norm = _attend(
        queries, acc, top, norm, heads_kv, pages, begin, full, seen_to, scale,
        D, STRIDE, PAGE, BN, BD, STAGES, False, 0, CT,
    )  # fmt: skip
    acc, top, norm = _attend(
        queries, acc, top, norm, heads_kv, pages, full, end, seen_to, scale,
        D, STRIDE, PAGE, BN, BD, STAGES, True, WINDOW, CT,
    )  # fmt: skip
    if SINKS:
        acc, norm = add_sinks(acc, top, norm, sinks, head * G + m % G, m < length * G)
    result = acc * (value_scale / norm)[:, None]
    tl.store(out + token[:, None] * (NKV * G * D) + column, result.to(out.dtype.element_ty), mask=inside)
