"""An indexer's scores of all places that rows see: their keys are read once for all queries of a tile.

Rows of a tile are (query, head) pairs: row m is query m // H and head m % H.
"""

import triton
import triton.language as tl

from sgl_kernel.attention.decode.kernels import place_offset, row_places, seen_by, tree_words
from sgl_kernel.attention.decode.planning.kernels import ITEM_FIELDS
from sgl_kernel.common.kernels import begin_dependent

LOWEST = tl.constexpr(-(2**31))


@triton.jit
def ordered(score):
    """int32 in the order of the scores; 0 for both zeros, the highest for what is not a number."""
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    key = tl.where(score == 0.0, 0, key)
    return tl.where(score != score, 0x7FFFFFFF, key)


@triton.jit(do_not_specialize=["first_row", "end_row"])
def score_kernel(
    q, weights, keys, items, base_lens, bits, page_table, scores, tops,
    q_stride, weight_stride, table_stride, score_stride, first_row, end_row, top_k,
    scratch_offset: tl.int64, scratch_cap,
    Q: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, EXTRA: tl.constexpr,
    CAUSAL: tl.constexpr, WORDS: tl.constexpr, SCRATCH: tl.constexpr, QB: tl.constexpr, H: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, CT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (b, i) scores item i for queries b * QB …, if its row is one of those asked for.

    A row whose places are all chosen needs no scores.
    """
    begin_dependent(PDL)
    fields = items + tl.program_id(1) * ITEM_FIELDS
    row = tl.load(fields)
    begin = tl.load(fields + 2)
    planned_end = tl.load(fields + 3)
    slot = tl.load(fields + 4)
    if (row < first_row) | (row >= end_row):
        return
    base = tl.load(base_lens + row).to(tl.int32)
    end = tl.minimum(planned_end, base + EXTRA)
    if (base + EXTRA <= top_k) | (begin >= end):
        return
    pages = page_table + slot.to(tl.int64) * table_stride
    nn = tl.arange(0, BN)
    place = row_places(pages, begin + nn, end, base, row, scratch_cap, PAGE, SCRATCH)

    m = tl.arange(0, QB * H)
    query = tl.program_id(0) * QB + m // H
    head = m % H
    d = tl.arange(0, BD)
    there = (query < Q) & (head < HEADS)
    token = (row * Q + query).to(tl.int64)
    at = (token * q_stride + head * D)[:, None] + d[None, :]
    queries = tl.load(q + at, mask=there[:, None] & (d < D)[None, :], other=0.0).to(CT)
    weight = tl.load(weights + token * weight_stride + head, mask=there, other=0.0)
    own = tl.program_id(0) * QB + tl.arange(0, QB)
    low, high = tree_words(bits, row * Q + own, own < Q, WORDS)
    local = (row - first_row) * Q + own
    lines = scores + local.to(tl.int64)[:, None] * score_stride
    top = tl.full([QB], LOWEST, tl.int32)
    for n0 in tl.range(begin, end, BN, num_stages=STAGES):
        n = n0 + nn
        rows = keys + place_offset(place, scratch_offset, D, SCRATCH)[:, None]
        place = row_places(pages, n + BN, end, base, row, scratch_cap, PAGE, SCRATCH)
        block = tl.load(rows + d[None, :], mask=(n < end)[:, None] & (d < D)[None, :], other=0.0).to(CT)
        dots = tl.dot(queries, tl.trans(block), input_precision="ieee")
        parts = tl.where(dots < 0.0, 0.0, dots) * weight[:, None]  # what is not a number stays so
        score = tl.sum(tl.reshape(parts, (QB, H, BN)), 1)
        score = tl.where(score == float("-inf"), -3.4028234663852886e38, score)  # that means unseen
        seen = seen_by(n, end, base, own, low, high, CAUSAL, WORDS)
        score = tl.where(seen, score, float("-inf"))
        tl.store(lines + n[None, :], score, mask=(own < Q)[:, None] & (n < end)[None, :])
        top = tl.maximum(top, tl.max(tl.where(seen, ordered(tl.abs(score)), LOWEST), 1))
    tl.atomic_max(tops + local, top, mask=own < Q, sem="relaxed")
