"""Which program multiplies which tokens with which expert."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent

# expert (-1: nothing to do), pairs, place of the first
BLOCK_FIELDS = tl.constexpr(3)
# More than any expert's number: where pairs without one are sorted.
_NOWHERE = tl.constexpr(1 << 30)


@triton.jit
def _interleaved(row, out, length, COLUMNS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of ``row`` in the order in which packed words give them: see ``products.kernels``."""
    for begin in range(0, length, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        within = at % (8 * WORDS)
        column = at - within + (within % WORDS) * 8 + within // WORDS
        value = tl.load(row + column, mask=column < COLUMNS, other=0.0)
        tl.store(out + at, value, mask=at < length)


@triton.jit(do_not_specialize=["num_pairs"])
def route_kernel(
    experts, blocks, order, x, ordered, num_pairs, x_stride, ordered_stride,
    TOP_K: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr, COMPACT: tl.constexpr, CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t finds where its token's TOP_K pairs lie among all pairs sorted by expert, without sorting.

    A pair's place is the number of pairs before it. Where a run of BM pairs of one expert begins, there is a
    block of work. Its description lies at that place, and those of other places say that there is none: as
    many blocks as pairs. COMPACT: block j of an expert lies at ``expert + before // BM + j``, where
    ``before`` pairs are of smaller experts; no two have the same number, all are below ``experts + pairs //
    BM``, and the rest has been filled with -1.
    WORDS: copy the token's row of x as well, in the order of packed words; 0: leave it.
    """
    begin_dependent(PDL)
    token = tl.program_id(0)
    slot = tl.arange(0, SLOTS)
    own = token * TOP_K + slot
    mine = tl.load(experts + own, mask=slot < TOP_K, other=-1).to(tl.int32)
    key = tl.where(mine < 0, _NOWHERE, mine)
    before = tl.zeros([SLOTS], tl.int32)  # pairs of smaller experts
    earlier = tl.zeros([SLOTS], tl.int32)  # of the same one, ahead of this
    same = tl.zeros([SLOTS], tl.int32)
    for begin in range(0, num_pairs, CHUNK):
        pair = begin + tl.arange(0, CHUNK)
        theirs = tl.load(experts + pair, mask=pair < num_pairs, other=_NOWHERE).to(tl.int32)
        theirs = tl.where(theirs < 0, _NOWHERE, theirs)[None, :]
        there = (pair < num_pairs)[None, :]
        is_same = there & (theirs == key[:, None])
        before += tl.sum((there & (theirs < key[:, None])).to(tl.int32), 1)
        same += tl.sum(is_same.to(tl.int32), 1)
        earlier += tl.sum((is_same & (pair[None, :] < own[:, None])).to(tl.int32), 1)
    place = before + earlier
    begins = (earlier % BM == 0) & (mine >= 0)
    here = slot < TOP_K
    tl.store(order + place, own, mask=here)
    if COMPACT:
        fields = blocks + (mine + before // BM + earlier // BM) * BLOCK_FIELDS
        told = here & begins
    else:
        fields = blocks + place * BLOCK_FIELDS
        told = here
    tl.store(fields, tl.where(begins, mine, -1), mask=told)
    tl.store(fields + 1, tl.minimum(same - earlier, BM), mask=told)
    tl.store(fields + 2, place, mask=told)
    if WORDS > 0:
        row = token.to(tl.int64)
        target = ordered + row * ordered_stride
        _interleaved(x + row * x_stride, target, ordered_stride, COLUMNS, WORDS, BLOCK)


@triton.jit
def interleave_kernel(
    x, ordered, x_stride, ordered_stride, COLUMNS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program t: the token's row of x in the order of packed words, where no ``route_kernel`` does it."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    target = ordered + row * ordered_stride
    _interleaved(x + row * x_stride, target, ordered_stride, COLUMNS, WORDS, BLOCK)
