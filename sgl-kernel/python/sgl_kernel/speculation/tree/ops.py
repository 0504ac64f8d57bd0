"""Draft trees: expand level by level, then keep the best nodes (EAGLE-2, arXiv 2406.16858).

Candidates are numbered in the order of their making: k children of the root, then for every further
level k children for each of k frontier nodes. A level is two launches, the tree comes with the last one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2
from sgl_kernel.sampling.choose import block_size
from sgl_kernel.speculation.tree.reference import expand_ref, finish_ref


@dataclass(frozen=True, slots=True)
class Frontier:
    """The k best nodes of a level, in descending order, and what the forward that is next reads of them.

    Their K and V go to the row's scratch places k * level … k * level + k - 1.
    """

    number: torch.Tensor  # [R, k] int32 candidate numbers
    score: torch.Tensor  # [R, k] float32 log score
    tokens: torch.Tensor  # [R, k] int64 target ids
    parent: torch.Tensor  # [R, k] int64 index in the frontier above; 0 at level 0
    positions: torch.Tensor  # [R, k] int64 for rope: L + level
    seen: torch.Tensor  # [R, k, k * (level + 1)] bool: the scratch places each sees

    @staticmethod
    def make(num_rows: int, topk: int, level: int, device: torch.device | str) -> Frontier:
        shape = (num_rows, topk)

        def empty(dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        i64 = torch.int64
        seen = torch.empty((*shape, topk * (level + 1)), dtype=torch.bool, device=device)
        return Frontier(
            empty(torch.int32), empty(torch.float32), empty(i64), empty(i64), empty(i64), seen
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """Of the trees of one step."""

    topk: int
    num_levels: int
    scores: torch.Tensor  # [R, P] float32; P = k + (levels - 1) * k * k
    tokens: torch.Tensor  # [R, P] int64
    parents: torch.Tensor  # [R, P] int32 candidate numbers; -1 the root
    places: torch.Tensor  # [R, P] int32 scratch
    levels: tuple[Frontier, ...]  # of all levels but the last, whose nodes get no children
    part_sum: torch.Tensor  # [R * k * blocks * 2] float32
    part_score: torch.Tensor  # [R * k * blocks * k] float32
    part_column: torch.Tensor  # [R * k * blocks * k] int32

    @staticmethod
    def make(
        num_rows: int, topk: int, num_levels: int, vocab_size: int, device: torch.device | str
    ) -> TreeBuffers:
        num_candidates = topk + (num_levels - 1) * topk * topk
        # The root has one line, a level k: the finer split of few lines needs the most blocks.
        blocks = -(-vocab_size // block_size(num_rows))
        lines = num_rows * topk

        def empty(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        i32, i64, f32 = torch.int32, torch.int64, torch.float32
        return TreeBuffers(
            topk=topk,
            num_levels=num_levels,
            scores=empty(f32, num_rows, num_candidates),
            tokens=empty(i64, num_rows, num_candidates),
            parents=empty(i32, num_rows, num_candidates),
            places=empty(i32, num_rows, num_candidates),
            levels=tuple(Frontier.make(num_rows, topk, level, device) for level in range(num_levels - 1)),
            part_sum=empty(f32, lines * blocks * 2),
            part_score=empty(f32, lines * blocks * topk),
            part_column=empty(i32, lines * blocks * topk),
        )

    def first(self, level: int) -> int:
        """Number of the first candidate of a level (the root's children are level 0)."""
        return 0 if level == 0 else self.topk + (level - 1) * self.topk**2


@dataclass(frozen=True, slots=True)
class Tree:
    """N nodes a row; node 0 is the root. Parents come before their children."""

    tokens: torch.Tensor  # [R, N] int64
    parents: torch.Tensor  # [R, N] int64; -1 for the root
    depths: torch.Tensor  # [R, N] int64
    mask: torch.Tensor  # [R, N, N] bool: (i, j) says that j is i or an ancestor of i

    @staticmethod
    def make(num_rows: int, num_nodes: int, device: torch.device | str) -> Tree:
        def empty() -> torch.Tensor:
            return torch.empty((num_rows, num_nodes), dtype=torch.int64, device=device)

        mask = torch.empty((num_rows, num_nodes, num_nodes), dtype=torch.bool, device=device)
        return Tree(empty(), empty(), empty(), mask)


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Whose noise a drafter's guesses get: that of the target's choice of the same index."""

    slots: torch.Tensor  # [R]
    root: torch.Tensor  # [R] index of the root's token, L
    temperature: torch.Tensor  # [slots] float32; 0: raw logits
    seed: torch.Tensor  # [slots] int64
    token_ids: torch.Tensor  # [V'] int64: the target's id of every draft id


def expand(
    level: int, logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers, *, pdl: bool = False
) -> Frontier:
    """Give the frontier of the level above (level 0: the root) its children, and return the new one.

    logits: [R * nodes, V'] float32 of the nodes that get children (1 a row at level 0, then k). What the
    drafter ranks is logits / T + noise (raw logits at T = 0); NaN counts as the lowest, equal ones by the
    lower id. A child's log score is its parent's plus the log softmax of that, at most 0 (-inf where it is
    not a number). Equal scores: the lower number first. Of all levels but the last.
    """
    assert level < buffers.num_levels - 1
    if use_kernel(logits):
        partial_launch(level, logits, rows, buffers, pdl=pdl).run()
        expand_launch(level, logits, rows, buffers, pdl=pdl).run()
    else:
        expand_ref(level, logits, rows, buffers)
    return buffers.levels[level]


def finish(
    logits: torch.Tensor,
    rows: DraftRows,
    buffers: TreeBuffers,
    root_tokens: torch.Tensor,
    out: Tree,
    *,
    pdl: bool = False,
) -> Tree:
    """Expand the last level as ``expand`` does; the best ``N - 1`` candidates of all beside the root.

    root_tokens: [R] int64, may be a column. N, the tree's size, is at most the number of candidates + 1.
    """
    if use_kernel(logits):
        partial_launch(buffers.num_levels - 1, logits, rows, buffers, pdl=pdl).run()
        finish_launch(logits, rows, buffers, root_tokens, out, pdl=pdl).run()
    else:
        finish_ref(logits, rows, buffers, root_tokens, out)
    return out


def partial_launch(
    level: int, logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers, *, pdl: bool
) -> Launch:
    """The best k of every block of the vocabulary."""
    from sgl_kernel.speculation.tree.kernels import children_partial_kernel

    num_lines, vocab_size = logits.shape
    k, num_nodes = buffers.topk, num_lines // rows.slots.shape[0]
    block = block_size(num_lines)
    blocks = -(-vocab_size // block)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_nodes == (k if level else 1)
    assert buffers.part_sum.numel() >= num_lines * blocks * 2 and k <= min(block, vocab_size)
    pdl = pdl and device_info(logits.device).has_pdl
    return Launch(
        children_partial_kernel,
        (blocks, num_lines),
        (
            logits, rows.token_ids, rows.slots, rows.root, rows.temperature, rows.seed, buffers.part_sum,
            buffers.part_score, buffers.part_column, logits.stride(0), vocab_size, level + 1,
        ),
        {"NODES": num_nodes, "K": k, "BLOCK": block, "PDL": pdl},
        num_warps=4 if block == 1024 else 8,
        pdl=pdl,
        fp_fusion=False,
    )  # fmt: skip


def _merging(level: int, logits: torch.Tensor, buffers: TreeBuffers) -> tuple[int, dict[str, Any]]:
    """Blocks of the vocabulary, and constants of the launch that takes the best of them."""
    num_lines, vocab_size = logits.shape
    k, num_nodes = buffers.topk, num_lines // buffers.scores.shape[0]
    blocks = -(-vocab_size // block_size(num_lines))
    parts = next_power_of_2(blocks * k)
    return blocks, {
        "FIRST": buffers.first(level),
        "NODES": num_nodes,
        "K": k,
        "K_PAD": next_power_of_2(k),
        # Parts are held in registers: at most 64 a thread of 4 warps, or 16 of 8.
        "GROUP": min(next_power_of_2(num_nodes), max(1, (8192 if k <= 8 else 4096) // parts)),
        "PART_PAD": parts,
        "BLOCK_PAD": next_power_of_2(blocks),
    }


def _num_warps(topk: int) -> int:
    """Of a row's program: wide trees need the registers, narrow ones the short reductions."""
    return 4 if topk <= 8 else 8


def expand_launch(
    level: int, logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers, *, pdl: bool
) -> Launch:
    from sgl_kernel.speculation.tree.kernels import expand_kernel

    blocks, constants = _merging(level, logits, buffers)
    above, out = buffers.levels[max(level - 1, 0)], buffers.levels[level]
    pdl = pdl and device_info(logits.device).has_pdl
    return Launch(
        expand_kernel,
        (buffers.scores.shape[0],),
        (
            buffers.part_sum, buffers.part_score, buffers.part_column, rows.token_ids, buffers.scores,
            buffers.tokens, buffers.parents, above.number, above.score, above.seen, rows.root, out.number,
            out.score, out.tokens, out.parent, out.positions, out.seen, blocks, buffers.scores.shape[1],
        ),
        {
            **constants,
            "LEVEL": level,
            "CHILD_PAD": next_power_of_2(constants["NODES"] * buffers.topk),
            "SEEN_PAD": next_power_of_2(buffers.topk * (level + 1)),
            "PDL": pdl,
        },
        num_warps=_num_warps(buffers.topk),
        pdl=pdl,
        fp_fusion=False,
    )  # fmt: skip


def finish_launch(
    logits: torch.Tensor,
    rows: DraftRows,
    buffers: TreeBuffers,
    root_tokens: torch.Tensor,
    out: Tree,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.speculation.tree.kernels import finish_kernel

    level, (num_rows, num_nodes) = buffers.num_levels - 1, out.tokens.shape
    blocks, constants = _merging(level, logits, buffers)
    count = buffers.scores.shape[1]
    cands = next_power_of_2(count)
    assert num_nodes - 1 <= count and out.mask.is_contiguous()
    # At level 0 there is no frontier above, and nothing of it is read.
    above = buffers.levels[level - 1] if level else None
    pdl = pdl and device_info(logits.device).has_pdl
    return Launch(
        finish_kernel,
        (num_rows,),
        (
            buffers.part_sum, buffers.part_score, buffers.part_column, rows.token_ids, buffers.scores,
            buffers.tokens, buffers.parents, buffers.places if above is None else above.number,
            buffers.scores if above is None else above.score, buffers.places, root_tokens, out.tokens,
            out.parents, out.depths, out.mask, blocks, count, root_tokens.stride(0),
        ),
        {
            **constants,
            "LEVELS": buffers.num_levels,
            "TREE": num_nodes,
            "TREE_PAD": next_power_of_2(num_nodes),
            "CAND_PAD": cands,
            "STEP": max(1, min(16, 8192 // cands)),
            "PDL": pdl,
        },
        num_warps=_num_warps(buffers.topk),
        pdl=pdl,
        fp_fusion=False,
    )  # fmt: skip
