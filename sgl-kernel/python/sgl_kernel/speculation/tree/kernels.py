"""Draft trees in Triton: the children of a level, the next frontier, and the tree of the best nodes.

The numbering and the order are those of ``srt/speculative/tree.py``: candidates are numbered as they
are made, and (score, then lower number) orders them.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent
from sgl_kernel.sampling.kernels import LARGEST, block_scores, row_keys


@triton.jit
def children_partial_kernel(
    logits,  # [R * NODES, VOCAB]
    token_ids,  # [VOCAB] int64 target ids
    slots,  # [R]
    root,  # [R]
    temperature,  # [slots] float32
    seed,  # [slots] int64
    part_sum,  # [R * NODES, blocks, 2] float32: best score, sum of exp(score - best)
    part_score,  # [R * NODES, blocks, K] float32, descending
    part_column,  # [R * NODES, blocks, K] int32
    logits_stride,
    VOCAB,
    offset,
    NODES: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    block = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    row = line // NODES
    slot = tl.load(slots + row).to(tl.int64)
    column = block * BLOCK + tl.arange(0, BLOCK)
    inside = column < VOCAB
    ids = tl.load(token_ids + column, mask=inside, other=0)
    # All nodes of a level guess a token of the same index.
    left, right = row_keys(tl.load(seed + slot), tl.load(root + row).to(tl.int64) + offset)
    heat = tl.load(temperature + slot)
    row_logits = logits + line * logits_stride
    score, _ = block_scores(row_logits, column, inside, ids, heat, 0.0, left, right, False)
    best = tl.maximum(tl.max(score, 0), -LARGEST)
    part = line * tl.num_programs(0) + block
    tl.store(part_sum + part * 2, best)
    tl.store(part_sum + part * 2 + 1, tl.sum(tl.exp(score - best), 0))
    # Below every score of the vocabulary: columns outside, and those taken.
    score = tl.where(inside, tl.maximum(score, -LARGEST), float("-inf"))
    for i in range(K):
        top, where = tl.max(score, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(part_score + part * K + i, top)
        tl.store(part_column + part * K + i, block * BLOCK + where)
        score = tl.where(column == block * BLOCK + where, float("-inf"), score)


@triton.jit
def _total(part_sum, line, BLOCKS, BLOCK_PAD: tl.constexpr):
    """logsumexp of a line from its blocks."""
    block = tl.arange(0, BLOCK_PAD)
    inside = block < BLOCKS
    at = part_sum + (line * BLOCKS + block) * 2
    best = tl.load(at, mask=inside, other=-LARGEST)
    mass = tl.load(at + 1, mask=inside, other=0.0)
    top = tl.max(best, 0)
    mass = tl.sum(mass * tl.exp(best - top), 0)
    # Nothing but NaN: children come last, with a probability of 0.
    return tl.where(mass > 0, top + tl.log(mass), float("inf"))


@triton.jit
def _rank(score, number, other_score, other_number):
    """How many of the others come before each; NaN-free."""
    before = other_score[None, :] > score[:, None]
    tied = (other_score[None, :] == score[:, None]) & (other_number[None, :] < number[:, None])
    return tl.sum((before | tied).to(tl.int32), 1)


@triton.jit
def expand_kernel(
    part_sum,  # [R * NODES, BLOCKS, 2]
    part_score,  # [R * NODES, BLOCKS, K]
    part_column,  # [R * NODES, BLOCKS, K]
    token_ids,  # [VOCAB] int64
    scores,  # [R, CAPACITY] float32, written from FIRST on
    tokens,  # [R, CAPACITY] int64, written
    parents,  # [R, CAPACITY] int32 candidate numbers, -1 the root; written
    above_number,  # [R, K] int32 frontier of the level above
    above_score,  # [R, K] float32
    number,  # [R, K] int32, the new frontier
    score,  # [R, K] float32
    token,  # [R, K] int64
    parent,  # [R, K] int64 index in the frontier above
    BLOCKS,
    CAPACITY,
    FIRST: tl.constexpr,
    NODES: tl.constexpr,
    K: tl.constexpr,
    CHILD_PAD: tl.constexpr,  # NODES * K or more
    PART_PAD: tl.constexpr,  # BLOCKS * K or more
    BLOCK_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    made = row * CAPACITY + FIRST
    part = tl.arange(0, PART_PAD)
    for node in range(NODES):
        line = row * NODES + node
        total = _total(part_sum, line, BLOCKS, BLOCK_PAD)
        held = tl.load(part_score + line * BLOCKS * K + part, mask=part < BLOCKS * K, other=float("-inf"))
        base, own = 0.0, -1
        if FIRST > 0:
            base, own = tl.load(above_score + row * K + node), tl.load(above_number + row * K + node)
        for i in range(K):
            top, where = tl.max(held, 0, return_indices=True, return_indices_tie_break_left=True)
            held = tl.where(part == where, float("-inf"), held)
            step = tl.minimum(top - total, 0.0)
            step = tl.where(step == step, step, float("-inf"))
            column = tl.load(part_column + line * BLOCKS * K + where)
            at = made + node * K + i
            tl.store(scores + at, base + step)
            tl.store(tokens + at, tl.load(token_ids + column))
            tl.store(parents + at, own)
    tl.debug_barrier()  # what one thread stored, all read
    child = tl.arange(0, CHILD_PAD)
    inside = child < NODES * K
    child_score = tl.load(scores + made + child, mask=inside, other=float("-inf"))
    order = tl.where(inside, child, child + CHILD_PAD)
    rank = _rank(child_score, order, child_score, order)
    keep = inside & (rank < K)
    target = row * K + rank
    tl.store(number + target, FIRST + child, mask=keep)
    tl.store(score + target, child_score, mask=keep)
    tl.store(token + target, tl.load(tokens + made + child, mask=inside, other=0), mask=keep)
    tl.store(parent + target, (child // K).to(tl.int64), mask=keep)


@triton.jit
def build_kernel(
    scores,  # [R, CAPACITY] float32
    cand_tokens,  # [R, CAPACITY] int64
    cand_parents,  # [R, CAPACITY] int32
    places,  # [R, CAPACITY] int32 scratch: a candidate's node, 0 if it is not kept
    root_tokens,  # [R] int64
    tokens,  # [R, NODES] int64
    parents,  # [R, NODES] int64
    depths,  # [R, NODES] int64
    mask,  # [R, NODES, NODES] bool
    CAPACITY,
    root_stride,
    COUNT: tl.constexpr,  # candidates there are
    K: tl.constexpr,
    LEVELS: tl.constexpr,
    NODES: tl.constexpr,
    CAND_PAD: tl.constexpr,
    NODE_PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    first = row * CAPACITY
    cand = tl.arange(0, CAND_PAD)
    inside = cand < COUNT
    score = tl.load(scores + first + cand, mask=inside, other=float("-inf"))
    rank = tl.zeros([CAND_PAD], tl.int32)
    STEP: tl.constexpr = 16
    for begin in range(0, COUNT, STEP):
        other = begin + tl.arange(0, STEP)
        other_score = tl.load(scores + first + other, mask=other < COUNT, other=float("-inf"))
        rank += _rank(score, cand, other_score, tl.where(other < COUNT, other, CAND_PAD))
    keep = inside & (rank < NODES - 1)
    place = tl.cumsum(keep.to(tl.int32), 0)  # the root is node 0
    tl.store(places + first + cand, tl.where(keep, place, 0), mask=inside)
    out = row * NODES
    tl.store(tokens + out, tl.load(root_tokens + row * root_stride))
    tl.store(parents + out, -1)
    tl.store(depths + out, 0)
    tl.debug_barrier()
    above = tl.load(cand_parents + first + cand, mask=keep, other=-1)
    # A kept candidate's parent is kept: it comes first in the order.
    parent = tl.load(places + first + above, mask=keep & (above >= 0), other=0)
    depth = tl.where(cand < K, 1, 2 + (cand - K) // (K * K))
    target = out + place
    tl.store(tokens + target, tl.load(cand_tokens + first + cand, mask=keep, other=0), mask=keep)
    tl.store(parents + target, parent.to(tl.int64), mask=keep)
    tl.store(depths + target, depth.to(tl.int64), mask=keep)
    node = tl.arange(0, NODE_PAD)
    here = node < NODES
    square = row * NODES * NODES + node * NODES
    other_node = tl.arange(0, NODE_PAD)[None, :]
    tl.store(mask + square[:, None] + other_node, other_node < 0, mask=here[:, None] & (other_node < NODES))
    tl.debug_barrier()
    ancestor = node.to(tl.int64)
    for _ in range(LEVELS + 1):
        tl.store(mask + square + ancestor, ancestor >= 0, mask=here)
        ancestor = tl.maximum(tl.load(parents + out + ancestor, mask=here, other=0), 0)
