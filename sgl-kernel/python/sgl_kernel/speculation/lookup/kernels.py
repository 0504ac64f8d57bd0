"""The latest of the longest matches of a text's end in the text before it, and what followed there."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def match_kernel(
    ids,  # [slots, width] int32
    slots,  # [R]
    root,  # [R] int64: where the last token of each text is
    best,  # [R, SPLITS] int64
    width,
    LONGEST: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of one part of a text: how many tokens agree, times ``width``, plus the place; -1: it has no place."""
    begin_dependent(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    last = tl.load(root + row).to(tl.int64)
    text = ids + tl.load(slots + row).to(tl.int64) * width
    size = tl.cdiv(tl.cdiv(last, SPLITS), BLOCK) * BLOCK
    begin = part * size
    end = tl.minimum(begin + size, last)
    found = tl.full((BLOCK,), -1, tl.int64)
    for first in range(begin, end, BLOCK):
        place = first + tl.arange(0, BLOCK)
        agreeing = tl.zeros((BLOCK,), tl.int64)
        still = place < end
        for back in tl.static_range(LONGEST):
            wanted = tl.load(text + last - back, mask=last >= back, other=-1)
            there = tl.load(text + place - back, mask=still & (place >= back), other=-2)
            still = still & (there == wanted) & (wanted >= 0)
            agreeing += still.to(tl.int64)
        found = tl.maximum(found, tl.where(place < end, agreeing * width + place, -1))
    tl.store(best + row * SPLITS + part, tl.max(found, 0))


@triton.jit
def drafts_kernel(
    ids,  # [slots, width] int32
    slots,  # [R]
    root,  # [R] int64
    best,  # [R, SPLITS] int64
    tokens,  # [R, >= 1 + DRAFTS] int64: columns 1 … DRAFTS are filled
    width,
    token_stride,
    DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr,  # DRAFTS or the next power of two
    SPLITS: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    last = tl.load(root + row).to(tl.int64)
    text = ids + tl.load(slots + row).to(tl.int64) * width
    rank = tl.max(tl.load(best + row * SPLITS + tl.arange(0, SPLITS)), 0)
    match = tl.where(rank >= 0, rank % width, last - 1)  # padding has no places
    draft = tl.arange(0, COLUMNS)
    # Past the end of the text the guess goes on with its own beginning, as a loop would.
    place = match + 1 + draft % (last - match)
    token = tl.load(text + place, mask=draft < DRAFTS, other=0)
    tl.store(tokens + row * token_stride + 1 + draft, tl.maximum(token, 0).to(tl.int64), mask=draft < DRAFTS)


@triton.jit
def note_kernel(
    ids,  # [slots, width] int32
    slots,  # [R]
    root,  # [R] int64
    tokens,  # [R, COLUMNS] int64, adjacent
    counts,  # [R] int64
    width,
    token_stride,
    pad_slot,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,  # COLUMNS or the next power of two
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    column = tl.arange(0, BLOCK)
    place = tl.load(root + row).to(tl.int64) + 1 + column
    wanted = (column < COLUMNS) & (column < tl.load(counts + row)) & (slot != pad_slot) & (place < width)
    token = tl.load(tokens + row * token_stride + column, mask=wanted, other=0)
    tl.store(ids + slot * width + place, token.to(tl.int32), mask=wanted)
