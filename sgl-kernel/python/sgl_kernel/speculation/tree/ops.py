"""Draft trees: expand level by level, then keep the best nodes (EAGLE-2, arXiv 2406.16858).

Candidates are numbered in the order of their making: k children of the root, then for every further
level k children for each of k frontier nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2
from sgl_kernel.sampling.choose import block_size
from sgl_kernel.sampling.noise import noise_of_bits, random_bits_ref


@dataclass(frozen=True, slots=True)
class Frontier:
    """The k best nodes of a level, in descending order; they get children."""

    number: torch.Tensor  # [R, k] int32 candidate numbers
    score: torch.Tensor  # [R, k] float32 log score
    tokens: torch.Tensor  # [R, k] int64 target ids
    parent: torch.Tensor  # [R, k] int64 index in the frontier above; 0 at level 1


@dataclass(frozen=True, slots=True)
class TreeBuffers:
    """Of trees of one shape, made once."""

    topk: int
    scores: torch.Tensor  # [R, P] float32; P = k + (levels - 1) * k * k
    tokens: torch.Tensor  # [R, P] int64
    parents: torch.Tensor  # [R, P] int32 candidate numbers; -1 the root
    places: torch.Tensor  # [R, P] int32 scratch
    levels: tuple[Frontier, ...]
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
        shape = (num_rows, topk)
        levels = tuple(
            Frontier(empty(i32, *shape), empty(f32, *shape), empty(i64, *shape), empty(i64, *shape))
            for _ in range(num_levels)
        )
        return TreeBuffers(
            topk=topk,
            scores=empty(f32, num_rows, num_candidates),
            tokens=empty(i64, num_rows, num_candidates),
            parents=empty(i32, num_rows, num_candidates),
            places=empty(i32, num_rows, num_candidates),
            levels=levels,
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

    logits: [R * nodes, V'] float32 of the nodes that get children (1 a row at level 0, then k).
    A child's log score is its parent's plus the log softmax of what the drafter ranks (logits / T +
    noise, raw logits at T = 0), at most 0; NaN counts as -inf. Equal scores: the lower number first.
    """
    if use_kernel(logits):
        for launch in expand_launches(level, logits, rows, buffers, pdl=pdl):
            launch.run()
    else:
        expand_ref(level, logits, rows, buffers)
    return buffers.levels[level]


def expand_ref(level: int, logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers) -> None:
    slots, k = rows.slots.to(torch.int64), buffers.topk
    ranks = logits.view(slots.shape[0], -1, logits.shape[1])
    heat = rows.temperature[slots][:, None, None]
    index = rows.root.to(torch.int64) + level + 1
    drawn = noise_of_bits(random_bits_ref(rows.seed[slots], index, rows.token_ids))[:, None]
    ranks = torch.where(heat > 0, ranks / torch.where(heat > 0, heat, 1.0) + drawn, ranks)
    log_probs = ranks.nan_to_num(nan=-torch.inf, posinf=torch.inf).log_softmax(dim=-1).clamp(max=0)
    log_probs = log_probs.nan_to_num(nan=-torch.inf, neginf=-torch.inf)
    step, column = log_probs.sort(dim=-1, descending=True, stable=True)
    step, column = step[..., :k], column[..., :k]  # [R, nodes, k]
    above = buffers.levels[level - 1] if level else None
    score = step if above is None else step + above.score[:, :, None]
    first, made = buffers.first(level), step[0].numel()
    part = slice(first, first + made)
    buffers.scores[:, part], buffers.tokens[:, part] = score.flatten(1), rows.token_ids[column].flatten(1)
    buffers.parents[:, part] = -1 if above is None else above.number.repeat_interleave(k, 1)
    order = score.flatten(1).sort(dim=1, descending=True, stable=True)
    best, out = order.indices[:, :k], buffers.levels[level]
    out.number.copy_(first + best)
    out.score.copy_(order.values[:, :k])
    out.tokens.copy_(buffers.tokens[:, part].gather(1, best))
    out.parent.copy_(best // k)


def expand_launches(
    level: int, logits: torch.Tensor, rows: DraftRows, buffers: TreeBuffers, *, pdl: bool
) -> tuple[Launch, Launch]:
    from sgl_kernel.speculation.tree.kernels import children_partial_kernel, expand_kernel

    num_lines, vocab_size = logits.shape
    num_rows, k = rows.slots.shape[0], buffers.topk
    num_nodes = num_lines // num_rows
    block = block_size(num_lines)
    blocks = -(-vocab_size // block)
    assert logits.dtype == torch.float32 and logits.stride(1) == 1 and num_nodes == (k if level else 1)
    assert buffers.part_sum.numel() >= num_lines * blocks * 2 and k <= min(block, vocab_size)
    parts = (buffers.part_sum, buffers.part_score, buffers.part_column)
    pdl = pdl and device_info(logits.device).has_pdl
    rowwise = (rows.token_ids, rows.slots, rows.root, rows.temperature, rows.seed)
    partial = Launch(
        children_partial_kernel,
        (blocks, num_lines),
        (logits, *rowwise, *parts, logits.stride(0), vocab_size, level + 1),
        {"NODES": num_nodes, "K": k, "BLOCK": block, "PDL": pdl},
        num_warps=4 if block == 1024 else 8,
        pdl=pdl,
        fp_fusion=False,
    )
    above, out = buffers.levels[max(level - 1, 0)], buffers.levels[level]
    candidates = (buffers.scores, buffers.tokens, buffers.parents)
    frontiers = (above.number, above.score, out.number, out.score, out.tokens, out.parent)
    merge = Launch(
        expand_kernel,
        (num_rows,),
        (*parts, rows.token_ids, *candidates, *frontiers, blocks, buffers.scores.shape[1]),
        {
            "FIRST": buffers.first(level),
            "NODES": num_nodes,
            "K": k,
            "CHILD_PAD": next_power_of_2(num_nodes * k),
            "PART_PAD": next_power_of_2(blocks * k),
            "BLOCK_PAD": next_power_of_2(blocks),
            "PDL": pdl,
        },
        num_warps=4,
        pdl=pdl,
        fp_fusion=False,
    )
    return partial, merge


def build(
    root_tokens: torch.Tensor, num_levels: int, buffers: TreeBuffers, out: Tree, *, pdl: bool = False
) -> Tree:
    """The best ``N - 1`` candidates of the first ``num_levels`` levels beside the root.

    root_tokens: [R] int64. N, the tree's size, is at most the number of candidates + 1.
    """
    if use_kernel(root_tokens):
        build_launch(root_tokens, num_levels, buffers, out, pdl=pdl).run()
    else:
        build_ref(root_tokens, num_levels, buffers, out)
    return out


def build_ref(root_tokens: torch.Tensor, num_levels: int, buffers: TreeBuffers, out: Tree) -> None:
    num_nodes, k, count = out.tokens.shape[1], buffers.topk, buffers.first(num_levels)
    for row in range(root_tokens.shape[0]):
        scores = buffers.scores[row, :count].tolist()
        kept = sorted(sorted(range(count), key=lambda c: (-scores[c], c))[: num_nodes - 1])
        place = {c: node for node, c in enumerate(kept, 1)}
        tokens, parents, depths = [int(root_tokens[row])], [-1], [0]
        for c in kept:
            above = int(buffers.parents[row, c])
            tokens.append(int(buffers.tokens[row, c]))
            parents.append(0 if above < 0 else place[above])
            depths.append(1 if c < k else 2 + (c - k) // k**2)
        out.mask[row] = False
        for node in range(num_nodes):
            ancestor = node
            while ancestor >= 0:
                out.mask[row, node, ancestor] = True
                ancestor = parents[ancestor]
        for target, values in ((out.tokens, tokens), (out.parents, parents), (out.depths, depths)):
            target[row] = torch.tensor(values)


def build_launch(
    root_tokens: torch.Tensor, num_levels: int, buffers: TreeBuffers, out: Tree, *, pdl: bool
) -> Launch:
    from sgl_kernel.speculation.tree.kernels import build_kernel

    num_rows, num_nodes = out.tokens.shape
    count = buffers.first(num_levels)
    assert num_nodes - 1 <= count and out.mask.is_contiguous()
    pdl = pdl and device_info(root_tokens.device).has_pdl
    candidates = (buffers.scores, buffers.tokens, buffers.parents, buffers.places)
    results = (out.tokens, out.parents, out.depths, out.mask)
    return Launch(
        build_kernel,
        (num_rows,),
        (*candidates, root_tokens, *results, buffers.scores.shape[1], root_tokens.stride(0)),
        {
            "COUNT": count,
            "K": buffers.topk,
            "LEVELS": num_levels,
            "NODES": num_nodes,
            "CAND_PAD": next_power_of_2(count),
            "NODE_PAD": next_power_of_2(num_nodes),
            "PDL": pdl,
        },
        num_warps=4,
        pdl=pdl,
    )
