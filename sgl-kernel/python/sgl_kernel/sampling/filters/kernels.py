"""The lowest score that top-k, top-p and min-p let stay, for the rows that ask.

In descending order an id stays as long as its rank is below k, the ids before it hold at most p, and
it has at least m of the best one's probability. All three hold for a beginning of the order, and equal
scores share their fate: so the cutoff is the lowest score v of the row with

    #{scores > v} < k,   P{scores > v} <= p,   P(v) >= m * P(best)

and it is found without sorting. One program a row: a pass for the softmax's total, a pass that
collects the scores that can be the cutoff (usually few), then a bisection over those.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent
from sgl_kernel.sampling.kernels import LARGEST, node_number


@triton.jit
def _key(score):
    """int32 in the order of the scores; -0 was made +0 before."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _score(key):
    """The score of a key."""
    bits = key ^ ((key >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _load_scores(logits, first, VOCAB, heat, BLOCK: tl.constexpr):
    """A block of scores, -inf outside and for NaN; -0 becomes +0."""
    column = first + tl.arange(0, BLOCK)
    inside = column < VOCAB
    score = tl.div_rn(tl.load(logits + column, mask=inside, other=0.0), heat) + 0.0
    return tl.where(inside & (score == score), score, float("-inf")), inside


@triton.jit
def _middle(low, high):
    """The key halfway, rounded down; the sum of two keys needs 33 bits."""
    return ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)


@triton.jit
def _kth_best(key, k):
    """The k-th largest of a block of keys."""
    low, high = tl.min(key, 0), tl.max(key, 0)
    while low < high:
        middle = _middle(low, high)
        enough = tl.sum((key > middle).to(tl.int32), 0) < k
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle + 1)
    return low


@triton.jit
def _softmax_total(logits, VOCAB, heat, BLOCK: tl.constexpr):
    """Best score, logsumexp, and the best score of each lane (a subset of the row)."""
    best = tl.full([BLOCK], -LARGEST, tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCAB, BLOCK):
        score, _ = _load_scores(logits, first, VOCAB, heat, BLOCK)
        new_best = tl.maximum(best, score)
        mass = mass * tl.exp(best - new_best) + tl.exp(score - new_best)
        best = new_best
    top = tl.max(best, 0)
    return top, top + tl.log(tl.sum(mass * tl.exp(best - top), 0)), best


@triton.jit
def _collect(logits, out, VOCAB, heat, total, top, least_key, least_prob, BLOCK: tl.constexpr):
    """The row's scores that can be the cutoff, in the order of their ids; returns how many."""
    count = 0
    for first in range(0, VOCAB, BLOCK):
        score, inside = _load_scores(logits, first, VOCAB, heat, BLOCK)
        wanted = (_key(score) >= least_key) & (tl.exp(score - total) >= least_prob)
        wanted = (wanted | (score == top)) & inside
        ones = wanted.to(tl.int32)
        tl.store(out + count + tl.cumsum(ones, 0) - 1, score, mask=wanted)
        count += tl.sum(ones, 0)
    return count


@triton.jit
def _look(collected, count, low, middle, high, total, BLOCK: tl.constexpr):
    """Number and mass above ``middle``, the next key above it, and the last one not above it."""
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    above = tl.zeros([BLOCK], tl.int32) + high
    below = tl.zeros([BLOCK], tl.int32) + low
    for first in range(0, count, BLOCK):
        place = first + tl.arange(0, BLOCK)
        inside = place < count
        score = tl.load(collected + place, mask=inside, other=0.0)
        key = _key(score)
        is_above = inside & (key > middle)
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, tl.exp(score - total), 0.0)
        above = tl.minimum(above, tl.where(is_above, key, high))
        below = tl.maximum(below, tl.where(inside & (key <= middle), key, low))
    return tl.sum(number, 0), tl.sum(mass, 0), tl.min(above, 0), tl.max(below, 0)


@triton.jit
def filter_cutoff_kernel(
    logits,  # [R * NODES, VOCAB] or [T, VOCAB] float32
    slots,  # [R]
    lines,  # [T] int64 numbers of nodes if LINES; else there is a line for each
    temperature,  # [slots] float32
    top_k,  # [slots] int64
    top_p,  # [slots] float32
    min_p,  # [slots] float32
    collected,  # float32 scratch as large as the logits
    cutoffs,  # float32, one a line
    logits_stride,
    VOCAB,
    NODES: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK: tl.constexpr,
    LOOK_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    line = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + node_number(lines, line, LINES) // NODES).to(tl.int64)
    heat, k = tl.load(temperature + slot), tl.load(top_k + slot)
    p, m = tl.load(top_p + slot), tl.load(min_p + slot)
    cutoff = float("-inf")
    if (heat > 0) & ((k < VOCAB) | (p < 1) | (m > 0)):
        row = logits + line * logits_stride
        top, total, lanes = _softmax_total(row, VOCAB, heat, BLOCK)
        least_key = _key(float("-inf") + tl.zeros([], tl.float32))
        if k <= BLOCK:  # k of the row's scores are at least this one
            least_key = _kth_best(_key(lanes), k)
        # The ids from the cutoff down hold 1 - p or more together, so the cutoff itself at least a
        # VOCAB-th of that (half of it, for the roundings).
        least_prob = tl.maximum(0.5 * (1.0 - p) / VOCAB, m * tl.exp(top - total))
        out = collected + line * VOCAB
        count = _collect(row, out, VOCAB, heat, total, top, least_key, least_prob, BLOCK)
        tl.debug_barrier()  # threads read what others collected
        top_key = _key(top)
        _, _, low, _ = _look(
            out, count, top_key, tl.full([], -2147483648, tl.int32), top_key, total, LOOK_BLOCK
        )
        high = top_key
        while low < high:
            number, mass, above, below = _look(out, count, low, _middle(low, high), high, total, LOOK_BLOCK)
            stays = (number < k) & ((mass <= p) | (p >= 1))
            high = tl.where(stays, below, high)
            low = tl.where(stays, low, above)
        cutoff = _score(low)
    tl.store(cutoffs + line, cutoff)
