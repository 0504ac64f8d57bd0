"""Which drafts the target's own choices confirm.

Verification is exact: a draft is kept if and only if it is the token the target chose at its parent
(with the noise a plain step would have used there), so what is put out never depends on the drafter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.model_executor.drafter import DraftTree


@dataclass(frozen=True, slots=True)
class Accepted:
    """The choices at nodes ``path[:, 0], path[:, 1] …`` are the tokens put out, ``counts`` of them."""

    path: torch.Tensor  # [R, C] int64 node; column j past the count holds j itself
    counts: torch.Tensor  # [R] int64, 1 … C


class TokenRewriter(Protocol):
    """Changes drafts and choices just before ``accept``: simulated acceptance, for benchmarks."""

    def rewrite(
        self,
        tokens: torch.Tensor,  # [R, N] int64 nodes' own tokens; written
        choice: torch.Tensor,  # [R, N] int64; written
        root: torch.Tensor,  # [R] int64
        slots: torch.Tensor,  # [R] int64
        parents: torch.Tensor | None = None,  # [R, N] int64; None: a chain
    ) -> None: ...


def accept(tree: DraftTree, choice: torch.Tensor, cap: torch.Tensor, num_columns: int) -> Accepted:
    """Walk from the root as long as a child equals the choice and at most ``cap`` drafts are taken.

    choice: [R, N] int64, the target's choice at each node; cap: [R] int64, 0 or more;
    num_columns: C, between 1 and N.
    """
    if tree.mask is None:
        return _accept_chain(tree.tokens, choice, cap)
    return _accept_tree(tree, choice, cap, num_columns)


def _accept_chain(tokens: torch.Tensor, choice: torch.Tensor, cap: torch.Tensor) -> Accepted:
    if tokens.shape[1] == 1:  # nothing to confirm, and the step is as many launches shorter
        return Accepted(torch.zeros_like(tokens), torch.ones_like(cap))
    column = torch.arange(tokens.shape[1], device=tokens.device)
    hits = (tokens[:, 1:] == choice[:, :-1]) & (column[1:] <= cap[:, None])
    counts = 1 + hits.to(torch.int64).cumprod(dim=1).sum(dim=1)
    return Accepted(column.expand(tokens.shape), counts)


def _accept_tree(tree: DraftTree, choice: torch.Tensor, cap: torch.Tensor, num_columns: int) -> Accepted:
    node = torch.zeros_like(cap)  # [R] where the walk stands
    alive = torch.ones_like(cap, dtype=torch.bool)
    counts = torch.ones_like(cap)
    path = [node]
    for column in range(1, num_columns):
        chosen = choice.gather(1, node[:, None])
        child = (tree.parents == node[:, None]) & (tree.tokens == chosen)  # [R, N], at most one a row
        alive = alive & child.any(dim=1) & (column <= cap)
        node = torch.where(alive, child.to(torch.int8).argmax(dim=1), node)
        path.append(torch.where(alive, node, column))
        counts = counts + alive
    return Accepted(torch.stack(path, dim=1), counts)
