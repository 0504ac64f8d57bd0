"""One layer's decode attention in Triton, by a plan.

Rows of a tile are (query, head of the group) pairs of one KV head: row m is query m // G and head m % G.
"""

import triton
import triton.language as tl

from sgl_kernel.attention.decode.merging.kernels import merge_levels
from sgl_kernel.attention.decode.planning.kernels import ITEM_FIELDS
from sgl_kernel.attention.decode.turning.kernels import turn_rows
from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def row_places(pages, n, end, base, row, scratch_cap, PAGE: tl.constexpr, SCRATCH: tl.constexpr):
    """Pool places of positions n of a row; scratch place s of the row is -1 - (row * cap + s)."""
    last = end
    if SCRATCH:
        last = tl.minimum(end, base)
    place = tl.load(pages + n // PAGE, mask=n < last, other=0) * PAGE + n % PAGE
    if SCRATCH:
        place = tl.where(n < base, place, base - n - 1 - row * scratch_cap)
    return place


@triton.jit
def place_offset(place, scratch_offset, STRIDE: tl.constexpr, SCRATCH: tl.constexpr):
    """Elements from the start of the layer's pool, [BN] int64."""
    offset = place.to(tl.int64) * STRIDE
    if SCRATCH:
        offset = tl.where(place >= 0, offset, scratch_offset + (-1 - place).to(tl.int64) * STRIDE)
    return offset


@triton.jit
def seen_by(n, end, base, query, low, high, CAUSAL: tl.constexpr, WORDS: tl.constexpr):
    """[BM, BN]: which positions each tile row sees."""
    seen = (n < end)[None, :]
    if CAUSAL:
        seen = seen & (n[None, :] <= base + query[:, None])
    if WORDS > 0:
        node = n - base
        shift = tl.minimum(tl.maximum(node, 0), 63).to(tl.int64)
        bit = low[:, None] >> shift[None, :]
        if WORDS > 1:
            shift = tl.minimum(tl.maximum(node - 64, 0), 63).to(tl.int64)
            bit = tl.where(node[None, :] < 64, bit, high[:, None] >> shift[None, :])
        seen = seen & ((node < 0)[None, :] | ((bit & 1) != 0))
    return seen


@triton.jit
def _ones(word):
    """How many bits of each int64 are set."""
    word -= (word >> 1) & 0x5555555555555555
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    word += word >> 8
    word += word >> 16
    return ((word + (word >> 32)) & 0x7F).to(tl.int32)


@triton.jit
def first_seen(
    base, query, low, high, EXTRA: tl.constexpr, WORDS: tl.constexpr, WINDOW: tl.constexpr
):  # fmt: skip
    """[BM]: the first position in each query's window; without one anything. A node of a tree stands after as
    many places as it sees, and the plan has left those of its ancestors that are in the window. Without
    places of their own all queries stand at the last of the base."""
    count = query + 1
    if EXTRA == 0:
        count = query * 0
    if WORDS > 0 and WINDOW > 0:
        count = _ones(low)
        if WORDS > 1:
            count += _ones(high)
    return base + count - WINDOW


@triton.jit
def _attend_chunk(
    queries, heads_kv, pages, place, begin, end, base, row, query, low, high, first, scale, scratch_offset,
    scratch_cap, d, PAGE: tl.constexpr, STRIDE: tl.constexpr, CAUSAL: tl.constexpr, WORDS: tl.constexpr,
    SCRATCH: tl.constexpr, WINDOW: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    CT: tl.constexpr,
):  # fmt: skip
    """Attend places begin … end - 1, with a WINDOW each row those from first[m] on.

    place: [BN], those of the first block.
    """
    BM: tl.constexpr = queries.shape[0]
    nn = tl.arange(0, BN)
    top = tl.full([BM], -1e30, tl.float32)
    # A sum over warps takes barriers: weights are added up in place, and summed after the loop, where
    # there are registers for that.
    WIDTH: tl.constexpr = BN if BM < 64 else 1
    norms = tl.zeros([BM, WIDTH], tl.float32)
    acc = tl.zeros([BM, d.shape[0]], tl.float32)
    # The places of the next block are loaded a block ahead and carried in registers. As a load in
    # front of the loads of K and V they would take pipeline stages of their own.
    for n0 in tl.range(begin, end, BN, num_stages=STAGES):
        n = n0 + nn
        at = place_offset(place, scratch_offset, STRIDE, SCRATCH)[:, None] + d[None, :]
        place = row_places(pages, n + BN, end, base, row, scratch_cap, PAGE, SCRATCH)
        there = (n < end)[:, None] & (d < D)[None, :]
        keys = tl.load(heads_kv + at, mask=there, other=0.0).to(CT)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        seen = seen_by(n, end, base, query, low, high, CAUSAL, WORDS)
        if WINDOW > 0:
            seen = seen & (n[None, :] >= first[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        mine = tl.exp2(top - new_top)
        norms *= mine[:, None]
        norms += weights if WIDTH > 1 else tl.sum(weights, 1)[:, None]
        values = tl.load(heads_kv + D + at, mask=there, other=0.0).to(CT)
        acc = tl.dot(weights.to(CT), values, acc * mine[:, None], input_precision="ieee")
        top = new_top
    return acc, top, tl.sum(norms, 1)


@triton.jit
def row_tokens(query_start, row, Q: tl.constexpr, RAGGED: tl.constexpr):
    """A row's first token of the step, and how many it has."""
    first = row * Q
    count = tl.full([], Q, tl.int32)
    if RAGGED:
        first = tl.load(query_start + row).to(tl.int32)
        count = tl.load(query_start + row + 1).to(tl.int32) - first
    return first, count


@triton.jit
def tree_words(bits, token, there, WORDS: tl.constexpr):
    """What a node of a tree sees of the others: [BM] each, zeros where nothing is masked by words."""
    low = tl.zeros(token.shape, tl.int64)
    high = low
    if WORDS > 0:
        low = tl.load(bits + token * WORDS, mask=there, other=0)
    if WORDS > 1:
        high = tl.load(bits + token * WORDS + 1, mask=there, other=0)
    return low, high


@triton.jit
def _scales(scale, kv_scale, head, SCALED: tl.constexpr):
    """Of scores, and of values."""
    of_values = 1.0
    if SCALED:
        scale *= tl.load(kv_scale + head * 2)
        of_values = tl.load(kv_scale + head * 2 + 1)
    return scale, of_values


@triton.jit
def add_sinks(acc, top, norm, sinks, head, there):
    """A place more for every row, of this score and without a value. sinks: [nq], head: [BM] of them."""
    score = tl.load(sinks + head, mask=there, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    new_top = tl.maximum(top, score)
    mine = tl.exp2(top - new_top)
    return acc * mine[:, None], norm * mine + tl.exp2(score - new_top)


@triton.jit
def decode_kernel(
    q, out, kv, items, base_lens, query_start, bits, page_table, kv_scale, sinks, partial, sums, counters,
    cos, sin, positions, places, q_weight, k_weight, eps,
    scale, q_stride, table_stride, num_partials, scratch_offset: tl.int64, scratch_cap,
    Q: tl.constexpr, G: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    EXTRA: tl.constexpr, CAUSAL: tl.constexpr, WORDS: tl.constexpr, SCRATCH: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, RAGGED: tl.constexpr, SCALED: tl.constexpr,
    TURN: tl.constexpr, NORM: tl.constexpr, FP8: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BD: tl.constexpr, Q_BLOCK: tl.constexpr, STAGES: tl.constexpr, FAN_IN: tl.constexpr,
    AT_ONCE: tl.constexpr, CT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, b) attends tile rows b * BM … of item i. The last one of a row and head merges.

    With TURN q is the product of q, k and v before rope, and there is one tile: the programs turn their
    queries, and those whose chunk has places of the queries' own (the last Q) write K and V there first.
    With RAGGED a row's queries are those from query_start[row] to query_start[row + 1], at most Q.
    """
    begin_dependent(PDL)
    fields = items + tl.program_id(0) * ITEM_FIELDS
    row = tl.load(fields)
    head = tl.load(fields + 1)
    begin = tl.load(fields + 2)
    planned_end = tl.load(fields + 3)
    slot = tl.load(fields + 4)
    if row < 0:
        return
    base = tl.load(base_lens + row).to(tl.int32)
    first_token, num_queries = row_tokens(query_start, row, Q, RAGGED)
    # A plan may have been made for longer rows.
    end = tl.minimum(planned_end, base + (EXTRA - Q) + num_queries if RAGGED else base + EXTRA)
    pages = page_table + slot.to(tl.int64) * table_stride
    # Up to the plan's end: the first places are on their way before ``base`` is here.
    place = row_places(pages, begin + tl.arange(0, BN), planned_end, base, row, scratch_cap, PAGE, SCRATCH)

    M: tl.constexpr = Q * G
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    query = m // G
    d = tl.arange(0, BD)
    token = first_token + query
    asked = m < num_queries * G if RAGGED else m < M
    heads = (head * G + m % G) * D
    inside = asked[:, None] & (d < D)[None, :]
    q_rows = q + token.to(tl.int64)[:, None] * q_stride + heads[:, None]
    low, high = tree_words(bits, token, m < M, WORDS)
    first = first_seen(base, query, low, high, EXTRA, WORDS, WINDOW)
    if TURN:
        new_kv = kv
        if SCRATCH:
            new_kv = kv + scratch_offset
        cache = (new_kv, kv_scale, begin, end, base + (EXTRA - Q))
        queries = turn_rows(
            q, q_rows, q_stride, positions, places, cos, sin, q_weight, k_weight, eps, cache, row, head, slot,
            asked, token, first_token, num_queries, d, Q, Q_BLOCK, NKV * G, NKV, D, EXTRA > 0, NORM, SCALED,
            FP8,
        ).to(CT)  # fmt: skip
    else:
        queries = tl.load(q_rows + d[None, :], mask=inside, other=0.0).to(CT)
    scale, value_scale = _scales(scale, kv_scale, head, SCALED)

    acc, top, norm = _attend_chunk(
        queries, kv + head * 2 * D, pages, place, begin, end, base, row, query, low, high, first,
        scale, scratch_offset, scratch_cap, d, PAGE, NKV * 2 * D, CAUSAL, WORDS, SCRATCH, WINDOW, D, BN,
        STAGES, CT,
    )  # fmt: skip
    acc, top, norm, complete = merge_levels(
        partial, sums, counters + tl.program_id(1) * num_partials, fields, acc, top, norm, m, d, M, D,
        FAN_IN, AT_ONCE,
    )  # fmt: skip
    if complete:
        if SINKS:
            acc, norm = add_sinks(acc, top, norm, sinks, head * G + m % G, m < M)
        # A row that sees nothing (padding) has a norm of 0 and gives 0.
        result = acc * (value_scale / tl.where(norm == 0.0, 1.0, norm))[:, None]
        if RAGGED:  # once more: the loop needs the registers
            first_token, num_queries = row_tokens(query_start, row, Q, RAGGED)
            token = first_token + query
            inside = (m < num_queries * G)[:, None] & (d < D)[None, :]
        out_at = token.to(tl.int64)[:, None] * (NKV * G * D) + heads[:, None] + d[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=inside)
