"""Draft trees in Triton: the children of a level, then the next frontier or the tree of the best nodes.

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
def _totals(part_sum, lines, inside, BLOCKS, BLOCK_PAD: tl.constexpr):
    """logsumexp of lines from their blocks, [GROUP]."""
    block = tl.arange(0, BLOCK_PAD)
    there = inside[:, None] & (block < BLOCKS)[None, :]
    at = part_sum + (lines[:, None] * BLOCKS + block[None, :]) * 2
    best = tl.load(at, mask=there, other=-LARGEST)
    mass = tl.load(at + 1, mask=there, other=0.0)
    top = tl.max(best, 1)
    mass = tl.sum(mass * tl.exp(best - top[:, None]), 1)
    # Nothing but NaN: children come last, with a probability of 0.
    return tl.where(mass > 0, top + tl.log(mass), float("inf"))


@triton.jit
def _best_parts(held, part, child, K: tl.constexpr):
    """The K best of each line's parts, the first of equal ones: scores and indices [GROUP, CHILD_PAD]."""
    GROUP: tl.constexpr = held.shape[0]
    score = tl.full([GROUP, child.shape[0]], float("-inf"), tl.float32)
    at = tl.zeros([GROUP, child.shape[0]], tl.int32)
    for i in range(K):
        top, where = tl.max(held, 1, return_indices=True, return_indices_tie_break_left=True)
        held = tl.where(part[None, :] == where[:, None], float("-inf"), held)
        score = tl.where((child == i)[None, :], top[:, None], score)
        at = tl.where((child == i)[None, :], where[:, None], at)
    return score, at


@triton.jit
def _make_children(
    part_sum, part_score, part_column, token_ids, scores, tokens, parents, above_number, above_score, row,
    BLOCKS, CAPACITY, FIRST: tl.constexpr, NODES: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    GROUP: tl.constexpr, PART_PAD: tl.constexpr, BLOCK_PAD: tl.constexpr,
):  # fmt: skip
    """The candidates of one row and level, GROUP nodes at a time. All threads see them when it returns."""
    part = tl.arange(0, PART_PAD)
    child = tl.arange(0, K_PAD)
    for begin in range(0, NODES, GROUP):
        node = begin + tl.arange(0, GROUP)
        inside = node < NODES
        lines = row * NODES + node
        there = inside[:, None] & (part < BLOCKS * K)[None, :]
        first_part = (lines * BLOCKS * K)[:, None]
        held = tl.load(part_score + first_part + part[None, :], mask=there, other=float("-inf"))
        score, at = _best_parts(held, part, child, K)
        there = inside[:, None] & (child < K)[None, :]
        column = tl.load(part_column + first_part + at, mask=there, other=0)
        step = tl.minimum(score - _totals(part_sum, lines, inside, BLOCKS, BLOCK_PAD)[:, None], 0.0)
        step = tl.where(step == step, step, float("-inf"))
        own = tl.full([GROUP], -1, tl.int32)
        if FIRST > 0:
            step += tl.load(above_score + row * K + node, mask=inside, other=0.0)[:, None]
            own = tl.load(above_number + row * K + node, mask=inside, other=-1)
        made = row * CAPACITY + FIRST + node[:, None] * K + child[None, :]
        tl.store(scores + made, step, mask=there)
        tl.store(tokens + made, tl.load(token_ids + column, mask=there, other=0), mask=there)
        tl.store(parents + made, tl.broadcast_to(own[:, None], there.shape), mask=there)
    tl.debug_barrier()  # what one thread stored, all read


@triton.jit
def _frontier(
    scores, tokens, root, above_seen, number, score, token, parent, positions, seen, row, CAPACITY,
    FIRST: tl.constexpr, LEVEL: tl.constexpr, NODES: tl.constexpr, K: tl.constexpr, K_PAD: tl.constexpr,
    CHILD_PAD: tl.constexpr, SEEN_PAD: tl.constexpr,
):  # fmt: skip
    """The K best of a level's candidates: what the next forward reads of them."""
    made = row * CAPACITY + FIRST
    child = tl.arange(0, CHILD_PAD)
    inside = child < NODES * K
    held = tl.load(scores + made + child, mask=inside, other=float("-inf"))
    # A score may be -inf: what is outside, or taken, is told apart from it by its order alone.
    free = tl.where(inside, child, CHILD_PAD)
    node = tl.arange(0, K_PAD)
    pick = tl.zeros([K_PAD], tl.int32)
    for i in range(K):
        top = tl.max(tl.where(free < CHILD_PAD, held, float("-inf")), 0)
        first = tl.min(tl.where(held == top, free, CHILD_PAD), 0)
        pick = tl.where(node == i, first, pick)
        free = tl.where(child == first, CHILD_PAD, free)
    there = node < K
    above = pick // K
    target = row * K + node
    tl.store(number + target, FIRST + pick, mask=there)
    tl.store(score + target, tl.load(scores + made + pick, mask=there, other=0.0), mask=there)
    tl.store(token + target, tl.load(tokens + made + pick, mask=there, other=0), mask=there)
    tl.store(parent + target, above.to(tl.int64), mask=there)
    position = tl.load(root + row).to(tl.int64) + LEVEL
    tl.store(positions + target, tl.zeros([K_PAD], tl.int64) + position, mask=there)
    # The scratch places that a node sees: its parent's, and its own.
    OLD: tl.constexpr = K * LEVEL
    place = tl.arange(0, SEEN_PAD)[None, :]
    sees = place == OLD + node[:, None]
    if LEVEL > 0:
        at = (row * K + above)[:, None] * OLD + place
        inherited = tl.load(above_seen + at, mask=there[:, None] & (place < OLD), other=0)
        sees = sees | (inherited != 0)
    WIDTH: tl.constexpr = OLD + K
    tl.store(seen + target[:, None] * WIDTH + place, sees, mask=there[:, None] & (place < WIDTH))


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
    above_seen,  # [R, K, K * LEVEL] bool
    root,  # [R]
    number,  # [R, K] int32, the new frontier
    score,  # [R, K] float32
    token,  # [R, K] int64
    parent,  # [R, K] int64 index in the frontier above
    positions,  # [R, K] int64
    seen,  # [R, K, K * (LEVEL + 1)] bool
    BLOCKS,
    CAPACITY,
    FIRST: tl.constexpr,
    LEVEL: tl.constexpr,
    NODES: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUP: tl.constexpr,  # nodes at a time
    PART_PAD: tl.constexpr,  # BLOCKS * K or more
    BLOCK_PAD: tl.constexpr,
    CHILD_PAD: tl.constexpr,  # NODES * K or more
    SEEN_PAD: tl.constexpr,  # K * (LEVEL + 1) or more
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    _make_children(
        part_sum, part_score, part_column, token_ids, scores, tokens, parents, above_number, above_score, row,
        BLOCKS, CAPACITY, FIRST, NODES, K, K_PAD, GROUP, PART_PAD, BLOCK_PAD,
    )  # fmt: skip
    _frontier(
        scores, tokens, root, above_seen, number, score, token, parent, positions, seen, row, CAPACITY, FIRST,
        LEVEL, NODES, K, K_PAD, CHILD_PAD, SEEN_PAD,
    )  # fmt: skip


@triton.jit
def _ranks(scores, first, score, cand, COUNT: tl.constexpr, STEP: tl.constexpr):
    """How many of the row's candidates come before each."""
    CAND_PAD: tl.constexpr = cand.shape[0]
    rank = tl.zeros([CAND_PAD], tl.int32)
    for begin in range(0, COUNT, STEP):
        other = begin + tl.arange(0, STEP)
        other_score = tl.load(scores + first + other, mask=other < COUNT, other=float("-inf"))
        number = tl.where(other < COUNT, other, CAND_PAD)
        before = other_score[None, :] > score[:, None]
        tied = (other_score[None, :] == score[:, None]) & (number[None, :] < cand[:, None])
        rank += tl.sum((before | tied).to(tl.int32), 1)
    return rank


@triton.jit
def _build(
    scores, cand_tokens, cand_parents, places, root_tokens, tokens, parents, depths, mask, row, CAPACITY,
    root_stride, COUNT: tl.constexpr, K: tl.constexpr, LEVELS: tl.constexpr, NODES: tl.constexpr,
    CAND_PAD: tl.constexpr, NODE_PAD: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The NODES - 1 best of a row's candidates beside the root."""
    first = row * CAPACITY
    cand = tl.arange(0, CAND_PAD)
    inside = cand < COUNT
    score = tl.load(scores + first + cand, mask=inside, other=float("-inf"))
    keep = inside & (_ranks(scores, first, score, cand, COUNT, STEP) < NODES - 1)
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


@triton.jit
def finish_kernel(
    part_sum,  # [R * NODES, BLOCKS, 2]
    part_score,  # [R * NODES, BLOCKS, K]
    part_column,  # [R * NODES, BLOCKS, K]
    token_ids,  # [VOCAB] int64
    scores,  # [R, CAPACITY] float32
    cand_tokens,  # [R, CAPACITY] int64
    cand_parents,  # [R, CAPACITY] int32
    above_number,  # [R, K] int32 frontier of the level above
    above_score,  # [R, K] float32
    places,  # [R, CAPACITY] int32 scratch: a candidate's node, 0 if it is not kept
    root_tokens,  # [R] int64
    tokens,  # [R, TREE] int64
    parents,  # [R, TREE] int64
    depths,  # [R, TREE] int64
    mask,  # [R, TREE, TREE] bool
    BLOCKS,
    CAPACITY,
    root_stride,
    FIRST: tl.constexpr,
    LEVELS: tl.constexpr,
    NODES: tl.constexpr,  # that get children
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    PART_PAD: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
    TREE: tl.constexpr,  # nodes of the tree
    TREE_PAD: tl.constexpr,
    CAND_PAD: tl.constexpr,
    STEP: tl.constexpr,  # candidates compared at a time
    PDL: tl.constexpr,
):
    """The last level: it needs no frontier, so the tree is built at once."""
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    _make_children(
        part_sum, part_score, part_column, token_ids, scores, cand_tokens, cand_parents, above_number,
        above_score, row, BLOCKS, CAPACITY, FIRST, NODES, K, K_PAD, GROUP, PART_PAD, BLOCK_PAD,
    )  # fmt: skip
    _build(
        scores, cand_tokens, cand_parents, places, root_tokens, tokens, parents, depths, mask, row, CAPACITY,
        root_stride, FIRST + NODES * K, K, LEVELS, TREE, CAND_PAD, TREE_PAD, STEP,
    )  # fmt: skip
