"""Build a draft tree by scores (EAGLE-2, arXiv 2406.16858: expand, then rerank).

Candidates are numbered in the order of their making: k children of the root, then for every further
level k children for each of k frontier nodes. A child's log score is its parent's plus something not
positive and its number is higher, so ordering by (score, then lower number) takes every parent
before its children, whatever the scores are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.model_executor.drafter import DraftTree


@dataclass(frozen=True, slots=True)
class Frontier:
    """The k nodes of one level that get children."""

    candidate: torch.Tensor  # [R, k] int64 number
    score: torch.Tensor  # [R, k] log score
    tokens: torch.Tensor  # [R, k] int64 target ids
    parent: torch.Tensor  # [R, k] int64 index in the frontier of the level before; 0 at level 1


class TreeBuilder:
    """Collects the candidates of one step, level by level."""

    def __init__(self, topk: int) -> None:
        self._topk = topk
        self._tokens: list[torch.Tensor] = []  # [R, …] a level each
        self._scores: list[torch.Tensor] = []
        self._parents: list[torch.Tensor] = []  # candidate numbers; -1: the root

    def add_roots_children(self, ranks: torch.Tensor, token_ids: torch.Tensor) -> Frontier:
        """Level 1. ranks: [R, 1, V'], what the drafter ranks; token_ids: [V'] their target ids."""
        score, tokens = _children(ranks, token_ids, self._topk)
        score, tokens = score[:, 0], tokens[:, 0]
        number = torch.arange(self._topk, device=tokens.device).expand_as(tokens)
        self._append(tokens, score, torch.full_like(tokens, -1))
        return Frontier(number, score, tokens, torch.zeros_like(tokens))

    def add_children(self, frontier: Frontier, ranks: torch.Tensor, token_ids: torch.Tensor) -> Frontier:
        """The next level and its best k nodes. ranks: [R, k, V'], one row for each frontier node."""
        k, first = self._topk, sum(t.shape[1] for t in self._tokens)
        step, tokens = _children(ranks, token_ids, k)  # [R, k, k] each
        score = (frontier.score[:, :, None] + step).flatten(1)
        tokens = tokens.flatten(1)
        parents = frontier.candidate.repeat_interleave(k, dim=1)
        self._append(tokens, score, parents)
        best_score, best = _best(score, k)
        return Frontier(first + best, best_score, tokens.gather(1, best), best // k)

    def build(self, root: torch.Tensor, num_nodes: int) -> DraftTree:
        """The best ``num_nodes - 1`` candidates beside the root. root: [R] int64."""
        scores = torch.cat(self._scores, dim=1)
        kept = _best(scores, num_nodes - 1)[1].sort(dim=1).values  # [R, N-1] numbers, ascending
        parent = torch.cat(self._parents, dim=1).gather(1, kept)
        # A kept node's parent is kept: its place among the kept numbers, after the root.
        parent = torch.where(parent < 0, 0, 1 + torch.searchsorted(kept, parent.contiguous()))
        # Level 1 has k candidates, every further level k * k.
        depth = torch.where(kept < self._topk, 1, 2 + (kept - self._topk) // self._topk**2)
        nothing = torch.zeros_like(root)[:, None]
        parents = torch.cat([nothing - 1, parent], dim=1)
        return DraftTree(
            tokens=torch.cat([root[:, None], torch.cat(self._tokens, dim=1).gather(1, kept)], dim=1),
            parents=parents,
            depths=torch.cat([nothing, depth], dim=1),
            mask=ancestor_mask(parents, len(self._tokens)),
        )

    def _append(self, tokens: torch.Tensor, score: torch.Tensor, parents: torch.Tensor) -> None:
        self._tokens.append(tokens)
        self._scores.append(score)
        self._parents.append(parents)


def ancestor_mask(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """[R, N] int64 -> [R, N, N] bool: entry (i, j) says that j is i or an ancestor of i."""
    num_rows, num_nodes = parents.shape
    ancestor = torch.arange(num_nodes, device=parents.device).expand(num_rows, -1)
    mask = torch.zeros(num_rows, num_nodes, num_nodes, dtype=torch.bool, device=parents.device)
    for _ in range(max_depth + 1):
        mask.scatter_(2, ancestor[:, :, None], True)
        ancestor = parents.gather(1, ancestor).clamp_(min=0)
    return mask


def _children(ranks: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log probabilities (at most 0) and target ids of the k best of each node; [R, nodes, k] each."""
    # A drafter gone wrong (NaN) must still give a tree: such children come last.
    ranks = ranks.nan_to_num(nan=-torch.inf, posinf=torch.inf)
    log_probs = ranks.log_softmax(dim=-1).clamp_(max=0).nan_to_num_(nan=-torch.inf, neginf=-torch.inf)
    index = _highest(ranks, k)
    return log_probs.gather(-1, index), token_ids[index]


def _highest(ranks: torch.Tensor, k: int) -> torch.Tensor:
    """Indices of the k best of [R, nodes, V'], in descending order, equal ones by the lower index."""
    top, index = ranks.topk(k, dim=-1)
    if bool(((ranks >= top[..., -1:]).sum(dim=-1) > k).any()):
        # topk takes any of equal ones. Rare, and sorting all is 30 times slower than this question.
        return ranks.sort(dim=-1, descending=True, stable=True).indices[..., :k]
    index, order = index.sort(dim=-1)
    best = top.gather(-1, order).sort(dim=-1, descending=True, stable=True).indices
    return index.gather(-1, best)


def _best(score: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` best of [R, P], equal scores by the lower index."""
    ordered, index = score.sort(dim=1, descending=True, stable=True)
    return ordered[:, :count], index[:, :count]
