"""Decode attention in Triton: the work plan of a step, and one layer's attention over it.

Rows of a tile are (query, head of the group) pairs of one KV head: row m is query m // G and head m % G.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent

# row, KV head, begin, end, slot, chunk, chunks of the row, partial of the row and head's chunk 0
ITEM_FIELDS = tl.constexpr(8)


@triton.jit
def _shortest_chunk(lens, total, budget, num_rows, MIN_UNITS: tl.constexpr, UNIT: tl.constexpr):
    """Shortest chunk, in units, with which the rows together have at most ``budget`` chunks.

    A row of length x has max(1, ceil(x / chunk)) chunks, so the answer lies between total / budget
    and total / (budget - num_rows): few halvings are left.
    """
    low = tl.maximum(tl.cdiv(total, budget * UNIT), MIN_UNITS)
    spare = tl.maximum(budget - num_rows, 0)
    high = tl.cdiv(tl.max(lens, 0), UNIT)
    if spare > 0:
        high = tl.minimum(high, tl.cdiv(total, spare * UNIT))
    high = tl.maximum(high, low)
    while low < high:
        middle = (low + high) // 2
        chunks = tl.maximum(tl.cdiv(lens, middle * UNIT), 1)
        if tl.sum(tl.where(lens >= 0, chunks, 0), 0) <= budget:
            high = middle
        else:
            low = middle + 1
    return low * UNIT


@triton.jit(do_not_specialize=["num_rows", "num_items", "mask_places", "scratch_cap", "write_start"])
def plan_kernel(
    slots, base_lens, page_table, mask, items, places, bits,
    num_rows, num_items, table_stride, mask_places, scratch_cap, write_start,
    Q: tl.constexpr, Q_BLOCK: tl.constexpr, NKV: tl.constexpr, PAGE: tl.constexpr, WRITE: tl.constexpr,
    EXTRA: tl.constexpr, WORDS: tl.constexpr, SCRATCH: tl.constexpr, MIN_UNITS: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program r writes what row r needs; program ``num_rows`` marks the items that are left over."""
    begin_dependent(PDL)
    own = tl.program_id(0)
    row = tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=0).to(tl.int32)
    base = tl.load(base_lens + row, mask=row < num_rows, other=0).to(tl.int32)
    # A padded row (slot 0) has one chunk of length 0: its output is zero, and it costs nothing.
    lens = tl.where(row < num_rows, tl.where(slot > 0, base + EXTRA, 0), -1)
    total = tl.sum(tl.maximum(lens, 0), 0)
    longest = _shortest_chunk(lens, total, num_items // NKV, num_rows, MIN_UNITS, UNIT)
    chunks = tl.where(lens >= 0, tl.maximum(tl.cdiv(lens, longest), 1), 0)
    first = (tl.cumsum(chunks, 0) - chunks) * NKV
    own_chunks = tl.sum(tl.where(row == own, chunks, 0), 0)
    own_first = tl.sum(tl.where(row == own, first, 0), 0)
    split = tl.where(chunks > 1, chunks, 0)
    partial = tl.sum(tl.where(row == own, (tl.cumsum(split, 0) - split) * NKV, 0), 0)
    own_len = tl.sum(tl.where(row == own, lens, 0), 0)
    own_slot = tl.sum(tl.where(row == own, slot, 0), 0)
    own_base = tl.sum(tl.where(row == own, base, 0), 0)
    # Chunks of one row are equally long, but for less than a unit.
    length = tl.cdiv(tl.cdiv(own_len, tl.maximum(own_chunks, 1)), UNIT) * UNIT
    count = own_chunks * NKV
    if own == num_rows:
        own_first = tl.sum(chunks, 0) * NKV
        count = num_items - own_first
    for start in range(0, count, ITEMS):
        i = start + tl.arange(0, ITEMS)
        head = i // tl.maximum(own_chunks, 1)
        chunk = i - head * own_chunks
        item = items + (own_first + i) * ITEM_FIELDS
        here = i < count
        tl.store(item, tl.where(own < num_rows, own, -1), mask=here)
        tl.store(item + 1, head, mask=here)
        tl.store(item + 2, chunk * length, mask=here)
        tl.store(item + 3, tl.minimum(chunk * length + length, own_len), mask=here)
        tl.store(item + 4, tl.zeros_like(i) + own_slot, mask=here)
        tl.store(item + 5, chunk, mask=here)
        tl.store(item + 6, tl.zeros_like(i) + own_chunks, mask=here)
        tl.store(item + 7, partial + head * own_chunks, mask=here)
    if own < num_rows:
        query = tl.arange(0, Q_BLOCK)
        if WRITE:
            if SCRATCH:
                place = (own * scratch_cap + write_start + query).to(tl.int64)
            else:
                position = own_base + query
                pages = page_table + own_slot.to(tl.int64) * table_stride
                page = tl.load(pages + position // PAGE, mask=query < Q, other=0).to(tl.int64)
                place = page * PAGE + position % PAGE
            tl.store(places + own * Q + query, place, mask=query < Q)
        for word in tl.static_range(WORDS):
            node = word * 64 + tl.arange(0, 64)
            at = (own * Q + query)[:, None] * mask_places + node[None, :]
            inside = (query < Q)[:, None] & (node < mask_places)[None, :]
            seen = tl.load(mask + at, mask=inside, other=0).to(tl.int64)
            packed = tl.sum(seen << (node % 64).to(tl.int64)[None, :], 1)
            tl.store(bits + (own * Q + query) * WORDS + word, packed, mask=query < Q)


@triton.jit
def _places(pages, n, end, base, row, scratch_cap, PAGE: tl.constexpr, SCRATCH: tl.constexpr):
    """Pool places of positions n of a row; scratch place s of the row is -1 - (row * cap + s)."""
    last = end
    if SCRATCH:
        last = tl.minimum(end, base)
    place = tl.load(pages + n // PAGE, mask=n < last, other=0) * PAGE + n % PAGE
    if SCRATCH:
        place = tl.where(n < base, place, base - n - 1 - row * scratch_cap)
    return place


@triton.jit
def _offset(place, scratch_offset, STRIDE: tl.constexpr, SCRATCH: tl.constexpr):
    """Elements from the start of the layer's pool, [BN] int64."""
    offset = place.to(tl.int64) * STRIDE
    if SCRATCH:
        offset = tl.where(place >= 0, offset, scratch_offset + (-1 - place).to(tl.int64) * STRIDE)
    return offset


@triton.jit
def _seen(n, end, base, query, low, high, CAUSAL: tl.constexpr, WORDS: tl.constexpr):
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
def _arrive(counter, expected):
    """True for the program that comes last; it finds the counter's partners' stores done."""
    tl.debug_barrier()  # all threads of this program have stored before one of them says so
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)  # for the next layer
    return last


@triton.jit
def _merge(partial, sums, first, step, count, m, d, M, D: tl.constexpr, AT_ONCE: tl.constexpr):
    """Sum the chunks at first, first + step, … in that order: who arrived last makes no difference."""
    BM: tl.constexpr = m.shape[0]
    top = tl.full([BM], -1e30, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, d.shape[0]], tl.float32)
    inside = (m < M)[:, None] & (d < D)[None, :]
    for begin in range(0, count, AT_ONCE):
        for k in tl.static_range(AT_ONCE):
            here = begin + k < count
            at = (first + (begin + k) * step).to(tl.int64) * M + m
            their_top = tl.load(sums + 2 * at, mask=here & (m < M), other=-1e30, cache_modifier=".cg")
            their_norm = tl.load(sums + 2 * at + 1, mask=here & (m < M), other=0.0, cache_modifier=".cg")
            theirs = tl.load(
                partial + at[:, None] * D + d[None, :], mask=here & inside, other=0.0, cache_modifier=".cg"
            )
            new_top = tl.maximum(top, their_top)
            mine, weight = tl.exp2(top - new_top), tl.exp2(their_top - new_top)
            acc = acc * mine[:, None] + theirs * weight[:, None]
            norm = norm * mine + their_norm * weight
            top = new_top
    return acc, top, norm


@triton.jit
def _store_partial(partial, sums, item, acc, top, norm, m, d, M, D: tl.constexpr):
    at = item.to(tl.int64) * M + m
    tl.store(sums + 2 * at, top, mask=m < M)
    tl.store(sums + 2 * at + 1, norm, mask=m < M)
    tl.store(partial + at[:, None] * D + d[None, :], acc, mask=(m < M)[:, None] & (d < D)[None, :])


@triton.jit
def _merge_levels(
    partial, sums, counters, item, acc, top, norm, m, d, M, D: tl.constexpr, FAN_IN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Partials of a row and head are merged in groups of FAN_IN, the groups' results again, and so on.

    Whoever comes last in a group goes on with its sum; the others are done. The third result says
    whether this program holds the sum of all.
    """
    index = tl.load(item + 5)  # loaded here: the loop needs the registers
    parts = tl.load(item + 6)
    first = tl.load(item + 7)
    step = 1
    level = 0
    while parts > 1:
        group = index // FAN_IN
        start = first + group * FAN_IN * step
        size = tl.minimum(parts - group * FAN_IN, FAN_IN)
        last = size == 1
        if size > 1:
            tl.debug_barrier()  # every thread has read what this replaces
            _store_partial(partial, sums, first + index * step, acc, top, norm, m, d, M, D)
            # Starts of groups on level l are multiples of FAN_IN ** (l + 1) from ``first`` on, l is below
            # FAN_IN, and a group of two or more reaches beyond start + l: so no two groups, of this row
            # and head or another, share a counter.
            last = _arrive(counters + start + level, size)
            if last:
                acc, top, norm = _merge(partial, sums, start, step, size, m, d, M, D, AT_ONCE)
        index = group
        parts = tl.where(last, tl.cdiv(parts, FAN_IN), 0)
        step *= FAN_IN
        level += 1
    return acc, norm, parts == 1


@triton.jit
def decode_kernel(
    q, out, kv, items, base_lens, bits, page_table, kv_scale, partial, sums, counters,
    scale, q_stride, table_stride, num_partials, scratch_offset: tl.int64, scratch_cap,
    Q: tl.constexpr, G: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    EXTRA: tl.constexpr, CAUSAL: tl.constexpr, WORDS: tl.constexpr, SCRATCH: tl.constexpr,
    SCALED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
    FAN_IN: tl.constexpr, AT_ONCE: tl.constexpr, CT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (i, b) attends tile rows b * BM … of item i. The last one of a row and head merges."""
    begin_dependent(PDL)
    item = tl.program_id(0)
    row = tl.load(items + item * ITEM_FIELDS)
    if row < 0:
        return
    head = tl.load(items + item * ITEM_FIELDS + 1)
    begin = tl.load(items + item * ITEM_FIELDS + 2)
    end = tl.load(items + item * ITEM_FIELDS + 3)
    slot = tl.load(items + item * ITEM_FIELDS + 4)
    base = tl.load(base_lens + row).to(tl.int32)
    end = tl.minimum(end, base + EXTRA)  # a plan may have been made for longer rows

    M: tl.constexpr = Q * G
    STRIDE: tl.constexpr = NKV * 2 * D
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    query = m // G
    d = tl.arange(0, BD)
    token = row * Q + query
    q_at = token.to(tl.int64)[:, None] * q_stride + ((head * G + m % G) * D)[:, None] + d[None, :]
    inside = (m < M)[:, None] & (d < D)[None, :]
    queries = tl.load(q + q_at, mask=inside, other=0.0).to(CT)
    low = tl.zeros([BM], tl.int64)
    high = low
    if WORDS > 0:
        low = tl.load(bits + token * WORDS, mask=m < M, other=0)
    if WORDS > 1:
        high = tl.load(bits + token * WORDS + 1, mask=m < M, other=0)
    value_scale = 1.0
    if SCALED:
        scale *= tl.load(kv_scale + head * 2)
        value_scale = tl.load(kv_scale + head * 2 + 1)

    pages = page_table + slot.to(tl.int64) * table_stride
    heads_kv = kv + head * 2 * D
    nn = tl.arange(0, BN)
    top = tl.full([BM], -1e30, tl.float32)
    # A sum over warps takes barriers: weights are added up in place, and summed after the loop, where
    # there are registers for that.
    WIDTH: tl.constexpr = BN if BM < 64 else 1
    norms = tl.zeros([BM, WIDTH], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    # The places of the next block are loaded a block ahead and carried in registers. As a load in
    # front of the loads of K and V they would take pipeline stages of their own.
    place = _places(pages, begin + nn, end, base, row, scratch_cap, PAGE, SCRATCH)
    for n0 in tl.range(begin, end, BN, num_stages=STAGES):
        n = n0 + nn
        at = _offset(place, scratch_offset, STRIDE, SCRATCH)[:, None] + d[None, :]
        place = _places(pages, n + BN, end, base, row, scratch_cap, PAGE, SCRATCH)
        there = (n < end)[:, None] & (d < D)[None, :]
        keys = tl.load(heads_kv + at, mask=there, other=0.0).to(CT)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(_seen(n, end, base, query, low, high, CAUSAL, WORDS), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        mine = tl.exp2(top - new_top)
        norms *= mine[:, None]
        norms += weights if WIDTH > 1 else tl.sum(weights, 1)[:, None]
        values = tl.load(heads_kv + D + at, mask=there, other=0.0).to(CT)
        acc = tl.dot(weights.to(CT), values, acc * mine[:, None], input_precision="ieee")
        top = new_top
    norm = tl.sum(norms, 1)

    acc, norm, complete = _merge_levels(
        partial, sums, counters + tl.program_id(1) * num_partials, items + item * ITEM_FIELDS,
        acc, top, norm, m, d, M, D, FAN_IN, AT_ONCE,
    )  # fmt: skip
    if complete:
        # A row that sees nothing (padding) has a norm of 0 and gives 0.
        result = acc * (value_scale / tl.where(norm == 0.0, 1.0, norm))[:, None]
        out_at = token.to(tl.int64)[:, None] * (NKV * G * D) + ((head * G + m % G) * D)[:, None] + d[None, :]
        tl.store(out + out_at, result.to(out.dtype.element_ty), mask=inside)
