"""One rank of a model that is split over several, as its layers see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch

from sglang.srt.distributed.collectives import Collectives, Norm, SingleRank
from sglang.srt.distributed.shares import HeadSpans, Span, even_span, head_spans, padded_span

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StreamShape:
    """Of the residual stream: with it sums are tried whose norm is wanted."""

    width: int
    dtype: torch.dtype


class Join(Protocol):
    """From what one rank has computed to what all of them have."""

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: [..., n], used up; the result is added to ``residual``, which is used up too."""
        ...

    def with_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The same of [T, n], and the norm of the result; None: it would be a launch of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Summing:
    """Of parts of a sum."""

    collectives: Collectives

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self.collectives.all_reduce(x.contiguous(), residual)

    def with_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.collectives.sum_and_norm(x.contiguous(), residual, norm)


@dataclass(frozen=True, slots=True)
class Joining:
    """Of features side by side, of which the last may be padding."""

    collectives: Collectives
    total: int

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        whole = joined(self.collectives, x)[..., : self.total]
        return whole if residual is None else residual.add_(whole)

    def with_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self(x, residual), None


def joined(collectives: Collectives, x: torch.Tensor) -> torch.Tensor:
    """x: [..., n] -> [..., size * n], the same on all ranks."""
    parts = collectives.all_gather(x.contiguous())  # [size, ..., n]
    return parts.movedim(0, -2).flatten(-2)


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Handed to models and layers; with one rank nothing is split and nothing is sent.

    Ranks compute the residual stream each for itself, so a reduction that rounds differently on two of
    them would let it differ. What decides is therefore gathered: logits are computed by one rank each and
    copied to all, so every rank chooses from the same bytes, in the target and in a drafter.
    """

    rank: int = 0
    size: int = 1
    collectives: Collectives = field(default_factory=SingleRank)
    unit: int = 1  # sizes are split in multiples of this: groups of a quantised checkpoint

    def in_units(self, unit: int) -> TensorParallel:
        return replace(self, unit=unit)

    # ---- what is this rank's

    def span(self, total: int, what: str) -> Span:
        """Of an MLP's inner size. ``what`` names it, should it be too small."""
        return even_span(total, self.rank, self.size, self.unit if self.size > 1 else 1, what)

    def heads(self, num_heads: int, num_kv_heads: int, where: str) -> HeadSpans:
        return head_spans(num_heads, num_kv_heads, self.rank, self.size, where)

    def rows(self, total: int) -> Span:
        """Of a matrix whose product is joined again (``joining``)."""
        return padded_span(total, self.rank, self.size)

    def padded_rows(self, total: int) -> int:
        """Rows that every rank must have, the missing ones of the last ranks included."""
        return -(-total // self.size)

    # ---- what ranks do together

    @property
    def summing(self) -> Join | None:
        """Of parts of a sum; None: there is one rank."""
        return Summing(self.collectives) if self.size > 1 else None

    def joining(self, total: int) -> Join | None:
        """Of ``rows(total)`` features; None: there is one rank."""
        return Joining(self.collectives, total) if self.size > 1 else None

    def first_alone(self, compiling: Callable[[], T]) -> T:
        """Compile; the first rank before the others, who then find its kernels on the disk. All at a time
        would compile the same ones, each with all of the host's cores."""
        if self.rank == 0:
            made = compiling()
            self.least(0)
            return made
        self.least(0)
        return compiling()

    def least(self, value: int) -> int:
        """The smallest that any rank has."""
        own = torch.tensor([value], device=self.collectives.device)
        return int(self.collectives.all_gather(own).min())

    def most(self, value: int) -> int:
        return -self.least(-value)

    def first(self, value: float) -> float:
        """The first rank's, for what ranks measure and must agree about."""
        own = torch.tensor([value], dtype=torch.float64, device=self.collectives.device)
        return float(self.collectives.all_gather(own)[0])
