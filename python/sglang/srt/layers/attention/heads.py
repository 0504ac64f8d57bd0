"""What a layer hands to its attention: a qkv product, and what its heads' norms and rotary embedding need.

A backend may have a kernel for all that follows; ``HeadProduct.turned`` is for the others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope, RopeAngles


class Positions:
    """Rope positions of one forward's tokens, and what else all layers want to know of them."""

    def __init__(
        self, rope: Rope, first: torch.Tensor, columns: int = 1, live: torch.Tensor | None = None
    ) -> None:
        """first: [R] int64, where rows of ``columns`` tokens each begin; T = R * columns.

        live: [T] bool; the others are padding, and what they get does not matter. None: all are.
        """
        self.rope = rope
        self.live = live
        self._first = first
        self._columns = columns

    @cached_property
    def of_tokens(self) -> torch.Tensor:
        """[T] int64. A kernel that counts from a row's first token itself never asks for it."""
        if self._columns == 1:
            return self._first
        return (self._first[:, None] + torch.arange(self._columns, device=self._first.device)).reshape(-1)

    @cached_property
    def angles(self) -> RopeAngles:
        return self.rope.at(self.of_tokens)


@dataclass(frozen=True, slots=True)
class Scope:
    """What a layer's queries attend to beside the rule of their step."""

    window: int | None = None  # of the places that a query sees only the last so many; None: all of them
    sinks: torch.Tensor | None = None  # [nq] scores of a place that every query sees and that gives nothing

    @property
    def is_plain(self) -> bool:
        return self.window is None and self.sinks is None


@dataclass(frozen=True, slots=True)
class HeadProduct:
    """q heads, then k, then v of T tokens, before norms and rope; without k and v: q alone."""

    qkv: torch.Tensor  # [T, (nq + 2 * nkv) * d] or [T, nq * d]; used up
    num_heads: int  # nq
    num_kv_heads: int  # nkv; 0: q alone, k and v are in the cache
    positions: Positions
    norm: RMSNorm | None = None  # weight [nq + nkv, d]
    scope: Scope = Scope()

    @property
    def head_dim(self) -> int:
        return self.qkv.shape[1] // (self.num_heads + 2 * self.num_kv_heads)

    def turned(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """q [T, nq, d], k and v [T, nkv, d] or None."""
        heads = self.qkv.view(self.qkv.shape[0], -1, self.head_dim)
        num_turned = self.num_heads + self.num_kv_heads
        qk = heads[:, :num_turned]
        if self.norm is not None:
            qk = self.norm(qk)
        qk = self.positions.angles.rotate(qk)
        if self.num_kv_heads == 0:
            return qk, None, None
        return qk[:, : self.num_heads], qk[:, self.num_heads :], heads[:, num_turned:]
