"""Sums of a row's chunks, by whichever program comes last."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import arrive


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
def merge_levels(
    partial, sums, counters, item, acc, top, norm, m, d, M, D: tl.constexpr, FAN_IN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Partials of a row and head are merged in groups of FAN_IN, the groups' results again, and so on.

    Whoever comes last in a group goes on with its sum; the others are done. The last result says
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
            last = arrive(counters + start + level, size)
            if last:
                acc, top, norm = _merge(partial, sums, start, step, size, m, d, M, D, AT_ONCE)
        index = group
        parts = tl.where(last, tl.cdiv(parts, FAN_IN), 0)
        step *= FAN_IN
        level += 1
    return acc, top, norm, parts == 1
