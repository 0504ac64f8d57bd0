"""The work plan of a decode step in Triton: which program attends which places of which row."""

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


@triton.jit
def _last_seen(seen, later, WINDOW: tl.constexpr):
    """seen: [Q, 64] 0 or 1, later: [Q] places seen after these -> those among a query's last WINDOW places,
    and how many it sees from these on."""
    after = tl.cumsum(seen, 1, reverse=True) + later[:, None]  # itself included
    return tl.where(after <= WINDOW, seen, 0), later + tl.sum(seen, 1)


@triton.jit(do_not_specialize=["num_rows", "num_items", "mask_places", "scratch_cap", "write_start"])
def plan_kernel(
    slots, base_lens, page_table, mask, items, places, bits,
    num_rows, num_items, table_stride, mask_places, scratch_cap, write_start,
    Q: tl.constexpr, Q_BLOCK: tl.constexpr, NKV: tl.constexpr, PAGE: tl.constexpr, WRITE: tl.constexpr,
    EXTRA: tl.constexpr, WORDS: tl.constexpr, SCRATCH: tl.constexpr, WINDOW: tl.constexpr,
    MIN_UNITS: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, ITEMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program r writes what row r needs; program ``num_rows`` marks the items that are left over."""
    begin_dependent(PDL)
    own = tl.program_id(0)
    row = tl.arange(0, ROWS)
    slot = tl.load(slots + row, mask=row < num_rows, other=0).to(tl.int32)
    base = tl.load(base_lens + row, mask=row < num_rows, other=0).to(tl.int32)
    # A padded row (slot 0) has one chunk of length 0: its output is zero, and it costs nothing.
    lens = tl.where(row < num_rows, tl.where(slot > 0, base + EXTRA, 0), -1)
    # Nobody sees a place before the window of the row's first query, which lies at base, or with no places of
    # the queries' own before it.
    if WINDOW > 0:
        outside = tl.where(lens > 0, tl.maximum(base + (1 if EXTRA > 0 else 0) - WINDOW, 0), 0)
        lens -= outside
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
    begin = 0
    if WINDOW > 0:
        begin = tl.sum(tl.where(row == own, outside, 0), 0)
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
        tl.store(item + 2, begin + chunk * length, mask=here)
        tl.store(item + 3, begin + tl.minimum(chunk * length + length, own_len), mask=here)
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
        later = tl.zeros([Q_BLOCK], tl.int64)
        for back in tl.static_range(WORDS):
            word = WORDS - 1 - back
            node = word * 64 + tl.arange(0, 64)
            at = (own * Q + query)[:, None] * mask_places + node[None, :]
            inside = (query < Q)[:, None] & (node < mask_places)[None, :]
            seen = tl.load(mask + at, mask=inside, other=0).to(tl.int64)
            if WINDOW > 0:
                seen, later = _last_seen(seen, later, WINDOW)
            packed = tl.sum(seen << (node % 64).to(tl.int64)[None, :], 1)
            tl.store(bits + (own * Q + query) * WORDS + word, packed, mask=query < Q)
