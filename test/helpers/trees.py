"""One small draft tree, and what its nodes see."""

from __future__ import annotations

import torch

PARENTS = (-1, 0, 0, 1, 1, 2, 3)  # of each node; they come first
NUM_NODES = len(PARENTS)


def path_to(node: int) -> list[int]:
    """The nodes from the root to this one."""
    parent = PARENTS[node]
    return [node] if parent < 0 else [*path_to(parent), node]


def depths() -> torch.Tensor:
    """[N] int64"""
    return torch.tensor([len(path_to(node)) - 1 for node in range(NUM_NODES)])


def ancestors() -> torch.Tensor:
    """[N, N] bool: row i names itself and the nodes above it."""
    mask = torch.zeros(NUM_NODES, NUM_NODES, dtype=torch.bool)
    for node in range(NUM_NODES):
        mask[node, path_to(node)] = True
    return mask
