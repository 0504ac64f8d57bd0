"""The highest scores of every query, exactly: two launches, each with a program for every chunk of a query.

The first counts scores by bins, and its last program finds the bin that the last chosen score is in. The
second puts out the scores above that bin, and its last program finds out which of those in it are chosen.
Every place in the output is worked out from counts, so it does not depend on who is first.
"""

import triton
import triton.language as tl

from sgl_kernel.attention.decode.kernels import row_places, seen_by
from sgl_kernel.attention.mla.indexing.scoring.kernels import LOWEST, ordered
from sgl_kernel.common.kernels import arrive, begin_dependent


@triton.jit
def _bin_of(key, top, BINS: tl.constexpr, SHIFT: tl.constexpr):
    """Ascending with the key. ``top``: the key of the largest size, of either sign.

    A key of k >= 0 has the size k, one of k < 0 the size -1 - k.
    """
    size = tl.where(key < 0, -1 - key, key)
    below = tl.maximum((top >> SHIFT) - (size >> SHIFT), 0)
    level = tl.maximum(BINS // 2 - 1 - below, 0)
    return tl.where(key < 0, BINS // 2 - 1 - level, BINS // 2 + level)


@triton.jit
def _keys_of(number, top, BINS: tl.constexpr, SHIFT: tl.constexpr):
    """The lowest and the highest key in a bin."""
    half: tl.constexpr = BINS // 2
    is_negative = number < half
    level = tl.where(is_negative, half - 1 - number, number - half)
    step = ((top >> SHIFT) - (half - 1 - level)).to(tl.int64)
    least = tl.where(level == 0, 0, step << SHIFT)
    most = tl.minimum(((step + 1) << SHIFT) - 1, top.to(tl.int64))
    low = tl.where(is_negative, -1 - most, least)
    # What is unseen is in the lowest bin, below all keys of it.
    low = tl.where(number == 0, LOWEST, low)
    return low, tl.where(is_negative, -1 - least, most)


@triton.jit
def _find_cut(
    bins, offsets, cuts, wanted, parts, BINS: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """The bin of the last chosen score, and how many chosen and near ones there are ahead of each chunk."""
    b = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for c0 in range(0, parts, CHUNKS):
        c = c0 + tl.arange(0, CHUNKS)
        at = bins + c[:, None] * BINS + b[None, :]
        total += tl.sum(tl.load(at, mask=(c < parts)[:, None], other=0, cache_modifier=".cg"), 0)
    reach = tl.sum(total, 0) - tl.cumsum(total, 0) + total  # scores in bin b and above
    cut = tl.sum((reach >= wanted).to(tl.int32), 0) - 1
    num_above = 0
    num_near = 0
    for c0 in range(0, parts, CHUNKS):
        c = c0 + tl.arange(0, CHUNKS)
        at = bins + c[:, None] * BINS + b[None, :]
        found = tl.load(at, mask=(c < parts)[:, None], other=0, cache_modifier=".cg")
        above = tl.sum(tl.where((b > cut)[None, :], found, 0), 1)
        near = tl.sum(tl.where((b == cut)[None, :], found, 0), 1)
        tl.store(offsets + 2 * c, num_above + tl.cumsum(above, 0) - above, mask=c < parts)
        tl.store(offsets + 2 * c + 1, num_near + tl.cumsum(near, 0) - near, mask=c < parts)
        num_above += tl.sum(above, 0)
        num_near += tl.sum(near, 0)
    tl.store(cuts, cut)
    tl.store(cuts + 1, num_above)
    tl.store(cuts + 2, num_near)


@triton.jit(do_not_specialize=["first_row", "num_chunks"])
def count_kernel(
    scores, slots, base_lens, counts, bins, offsets, cuts, tops, counters,
    score_stride, first_row, num_chunks, top_k,
    Q: tl.constexpr, EXTRA: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, t) counts chunk p of token t."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    local = tl.program_id(1)
    token = first_row * Q + local
    slot = tl.load(slots + token // Q)
    length = tl.load(base_lens + token // Q).to(tl.int32) + EXTRA
    if (slot == 0) | (length <= top_k) | (chunk * CHUNK >= length):
        return
    n = chunk * CHUNK + tl.arange(0, CHUNK)
    line = scores + local.to(tl.int64) * score_stride
    score = tl.load(line + n, mask=n < length, other=float("-inf"))
    number = _bin_of(ordered(score), tl.load(tops + local), BINS, SHIFT)
    found = tl.histogram(number, BINS, n < length)
    own_bins = bins + local.to(tl.int64) * num_chunks * BINS
    tl.store(own_bins + chunk * BINS + tl.arange(0, BINS), found)
    parts = tl.cdiv(length, CHUNK)
    if arrive(counters + local, parts):
        wanted = tl.load(counts + token).to(tl.int32)
        own_offsets = offsets + local.to(tl.int64) * num_chunks * 2
        _find_cut(own_bins, own_offsets, cuts + local * 4, wanted, parts, BINS, CHUNKS)


@triton.jit
def _take_all(
    out, bits, pages, base, length, query, token, row, scratch_cap, CAUSAL: tl.constexpr,
    WORDS: tl.constexpr, SCRATCH: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Every place that the query sees."""
    own = tl.zeros([1], tl.int32) + query
    low = tl.zeros([1], tl.int64)
    high = low
    if WORDS > 0:
        low += tl.load(bits + token * WORDS)
    if WORDS > 1:
        high += tl.load(bits + token * WORDS + 1)
    taken = 0
    for n0 in range(0, length, CHUNK):
        n = n0 + tl.arange(0, CHUNK)
        seen = tl.reshape(seen_by(n, length, base, own, low, high, CAUSAL, WORDS), (CHUNK,)).to(tl.int32)
        place = row_places(pages, n, length, base, row, scratch_cap, PAGE, SCRATCH)
        tl.store(out + taken + tl.cumsum(seen, 0) - seen, place, mask=seen != 0)
        taken += tl.sum(seen, 0)


@triton.jit
def _count_from(
    pivot, near, line, again, length, cut, top, CHUNK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """Scores of the bin that are at least ``pivot``. near: those held in registers; again: read from line."""
    count = tl.sum((near >= pivot).to(tl.int32), 0)
    for n0 in range(0, again, CHUNK):
        n = n0 + tl.arange(0, CHUNK)
        key = ordered(tl.load(line + n, mask=n < length, other=float("-inf")))
        inside = (n < length) & (_bin_of(key, top, BINS, SHIFT) == cut)
        count += tl.sum((inside & (key >= pivot)).to(tl.int32), 0)
    return count


@triton.jit
def _last_key(
    wanted, near, line, again, length, cut, top, CHUNK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The ``wanted``-th highest of the bin, by halving; zero first, which many scores are.

    Returns it, and how many are higher.
    """
    low, high = _keys_of(cut, top, BINS, SHIFT)
    higher = 0  # that are higher than ``high``
    while low < high:
        middle = low + (high - low + 1) // 2
        middle = tl.where((low < 1) & (high >= 1), 1, middle)
        count = _count_from(middle.to(tl.int32), near, line, again, length, cut, top, CHUNK, BINS, SHIFT)
        if count >= wanted:
            low = middle
        else:
            high = middle - 1
            higher = count
    return low.to(tl.int32), higher


@triton.jit
def _take_near(
    out, pages, near, near_place, line, again, length, base, cut, top, wanted, row, scratch_cap,
    SCRATCH: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr,
):  # fmt: skip
    """The ``wanted`` highest of the bin, of equal ones the earlier."""
    last, higher = _last_key(wanted, near, line, again, length, cut, top, CHUNK, BINS, SHIFT)
    room = wanted - higher  # for those equal to the last
    equal = (near == last).to(tl.int32)
    taken = (near > last) | ((equal != 0) & (tl.cumsum(equal, 0) <= room))
    order = taken.to(tl.int32)
    tl.store(out + tl.cumsum(order, 0) - order, near_place, mask=taken)
    begin = 0  # ``again`` is 0 where ``near`` holds them
    for n0 in range(0, again, CHUNK):
        n = n0 + tl.arange(0, CHUNK)
        key = ordered(tl.load(line + n, mask=n < length, other=float("-inf")))
        inside = (n < length) & (_bin_of(key, top, BINS, SHIFT) == cut)
        same = (inside & (key == last)).to(tl.int32)
        best = (inside & (key > last)) | ((same != 0) & (tl.cumsum(same, 0) <= room))
        rank = best.to(tl.int32)
        place = row_places(pages, n, length, base, row, scratch_cap, PAGE, SCRATCH)
        tl.store(out + begin + tl.cumsum(rank, 0) - rank, place, mask=best)
        begin += tl.sum(rank, 0)
        room -= tl.minimum(tl.sum(same, 0), room)


@triton.jit
def _take_best(
    out, pages, line, offsets, cuts, tops, counter, near_keys, near_places, wanted, base, length, chunk,
    row, scratch_cap, SCRATCH: tl.constexpr, PAGE: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr,
    SHIFT: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    n = chunk * CHUNK + tl.arange(0, CHUNK)
    top = tl.load(tops)
    cut = tl.load(cuts)
    num_above = tl.load(cuts + 1)
    num_near = tl.load(cuts + 2)
    key = ordered(tl.load(line + n, mask=n < length, other=float("-inf")))
    number = _bin_of(key, top, BINS, SHIFT)
    above = ((n < length) & (number > cut)).to(tl.int32)
    is_near = ((n < length) & (number == cut)).to(tl.int32)
    both = above + (is_near << 16)
    before = tl.cumsum(both, 0) - both  # one scan for the two: a chunk has less than 2**16 of each
    place = row_places(pages, n, length, base, row, scratch_cap, PAGE, SCRATCH)
    tl.store(out + tl.load(offsets + 2 * chunk) + (before & 0xFFFF), place, mask=above != 0)
    at = tl.load(offsets + 2 * chunk + 1) + (before >> 16)
    kept = (is_near != 0) & (at < NEAR)
    tl.store(near_keys + at, key, mask=kept)
    tl.store(near_places + at, place, mask=kept)
    if arrive(counter, tl.cdiv(length, CHUNK)):
        i = tl.arange(0, NEAR)
        fits = num_near <= NEAR
        held = (i < num_near) & fits
        near = tl.load(near_keys + i, mask=held, other=LOWEST, cache_modifier=".cg")
        near_place = tl.load(near_places + i, mask=held, other=0, cache_modifier=".cg")
        again = tl.where(fits, 0, length)
        _take_near(
            out + num_above, pages, near, near_place, line, again, length, base, cut, top, wanted - num_above,
            row, scratch_cap, SCRATCH, PAGE, CHUNK, BINS, SHIFT,
        )  # fmt: skip
        tl.store(tops, LOWEST)


@triton.jit(do_not_specialize=["first_row", "num_chunks", "scratch_cap"])
def choose_kernel(
    scores, slots, base_lens, bits, page_table, counts, offsets, cuts, tops, counters, near_keys, near_places,
    chosen, score_stride, table_stride, first_row, num_chunks, top_k, scratch_cap,
    Q: tl.constexpr, EXTRA: tl.constexpr, CAUSAL: tl.constexpr, WORDS: tl.constexpr, SCRATCH: tl.constexpr,
    PAGE: tl.constexpr, CHUNK: tl.constexpr, BINS: tl.constexpr, SHIFT: tl.constexpr, NEAR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, t) takes what is chosen of chunk p of token t."""
    begin_dependent(PDL)
    chunk = tl.program_id(0)
    local = tl.program_id(1)
    token = first_row * Q + local
    row = token // Q
    slot = tl.load(slots + row)
    base = tl.load(base_lens + row).to(tl.int32)
    length = base + EXTRA
    pages = page_table + slot.to(tl.int64) * table_stride
    out = chosen + (token + 1).to(tl.int64) * top_k
    if (slot > 0) & (chunk * CHUNK < length):
        if length > top_k:
            wanted = tl.load(counts + token).to(tl.int32)
            wide = local.to(tl.int64)
            _take_best(
                out, pages, scores + wide * score_stride, offsets + wide * num_chunks * 2, cuts + local * 4,
                tops + local, counters + local, near_keys + wide * NEAR, near_places + wide * NEAR, wanted,
                base, length, chunk, row, scratch_cap, SCRATCH, PAGE, CHUNK, BINS, SHIFT, NEAR,
            )  # fmt: skip
        elif chunk == 0:
            _take_all(
                out, bits, pages, base, length, token % Q, token, row, scratch_cap, CAUSAL, WORDS, SCRATCH,
                PAGE, CHUNK,
            )  # fmt: skip
