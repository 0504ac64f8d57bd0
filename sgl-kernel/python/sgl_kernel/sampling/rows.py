"""Which tokens are being chosen: rows of nodes, and the request each row belongs to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch


class Depths(IntEnum):
    """What a node adds to the index of its row's root."""

    SHARED = 0  # nothing: all nodes of a row choose a token of the same index (a drafter's frontier)
    CHAIN = 1  # its number
    TREE = 2  # its depth


@dataclass(frozen=True, slots=True)
class NodeRows:
    """R rows of N nodes. The token chosen at a node has index ``root + depth + offset``.

    Logits have a line for each node; with ``lines`` for some only: line t is node ``lines[t] % N`` of row
    ``lines[t] // N``.
    """

    slots: torch.Tensor  # [R] integer
    root: torch.Tensor  # [R] integer index in the sequence of the root's token
    num_nodes: int  # N
    kind: Depths = Depths.CHAIN
    depths: torch.Tensor | None = None  # [R, N] integer, of a tree
    offset: int = 1
    lines: torch.Tensor | None = None  # [T] int64, ascending; of a chain

    @property
    def num_lines(self) -> int:
        """R * N, or T: the rows of logits."""
        return self.slots.shape[0] * self.num_nodes if self.lines is None else self.lines.shape[0]

    def index(self) -> torch.Tensor:
        """[R, N] int64."""
        root = self.root.to(torch.int64)[:, None] + self.offset
        if self.kind is Depths.TREE:
            assert self.depths is not None
            return root + self.depths
        if self.kind is Depths.CHAIN:
            return root + torch.arange(self.num_nodes, device=root.device)
        return root.expand(-1, self.num_nodes)

    def of_slots(self, values: torch.Tensor) -> torch.Tensor:
        """[slots, …] -> [R * N, …], or [T, …]"""
        return self.of_lines(values[self.slots.to(torch.int64)].repeat_interleave(self.num_nodes, 0))

    def lines_or(self, other: torch.Tensor) -> torch.Tensor:
        """An address for a kernel that reads it only if there are ``lines``."""
        return other if self.lines is None else self.lines

    def of_lines(self, values: torch.Tensor) -> torch.Tensor:
        """[R * N, …] -> those that have a line."""
        return values if self.lines is None else values[self.lines]
