"""A mixture of experts in the place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang.srt.distributed.tensor_parallel import Join
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.stream import Stream


class MLP(Protocol):
    """What a layer has after its attention: plain, or a mixture of experts."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(
        self, stream: Stream, norm: RMSNorm, live: torch.Tensor | None = None, then: RMSNorm | None = None
    ) -> Stream:
        """The MLP of the normed residual stream added to it; that is used up.

        live: [T] bool; what the others get does not matter, and should cost nothing. None: all. ``then``: see
        ``Stream``.
        """
        ...

    def norms_apart(self, rows: int) -> bool:
        """Whether it launches a norm of so many rows by itself; the same on all ranks."""
        ...

    def linears(self) -> Sequence[Linear]: ...


class SharedMLP(MLP, Protocol):
    """Experts that every token goes to."""

    def part(self, normed: torch.Tensor) -> torch.Tensor:
        """normed: [T, H] -> [T, H], what this rank adds to the sum of all."""
        ...


class Router(Protocol):
    @property
    def weight_bytes(self) -> int: ...

    def linears(self) -> Sequence[Linear]: ...

    def normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x: [T, H] -> ``norm(x)``"""
        ...

    def __call__(
        self, normed: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """normed: [T, H]; live: [T] bool, None: all -> [T, k] weights and experts; -1: none."""
        ...


class ExpertProducts(Protocol):
    @property
    def weight_bytes(self) -> int: ...

    def __call__(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        experts: torch.Tensor,
        base: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x: [T, H], normed; weights and experts: [T, k] -> [T, H], added to base."""
        ...


class MoE:
    """Router, experts, and the shared experts if there are any (an ``MLP`` that adds itself first)."""

    def __init__(
        self,
        router: Router,
        experts: ExpertProducts,
        shared: SharedMLP | None,
        summing: Join | None = None,  # of the ranks' parts; None: there is one rank
    ) -> None:
        self.router = router
        self.experts = experts
        self.shared = shared
        self._summing = summing

    @property
    def weight_bytes(self) -> int:
        shared = 0 if self.shared is None else self.shared.weight_bytes
        return self.router.weight_bytes + self.experts.weight_bytes + shared

    def linears(self) -> Sequence[Linear]:
        shared = [] if self.shared is None else self.shared.linears()
        return [*self.router.linears(), *shared]

    def norms_apart(self, rows: int) -> bool:
        """Router and experts read the same."""
        return True

    def __call__(
        self, stream: Stream, norm: RMSNorm, live: torch.Tensor | None = None, then: RMSNorm | None = None
    ) -> Stream:
        """Shared and chosen experts of the normed stream added to it."""
        x, still = stream.input_of(norm)
        normed = x if still is None else self.router.normed(x, still)
        weights, experts = self.router(normed, live)
        if self._summing is None:
            base = stream.x if self.shared is None else self.shared(stream, norm).x
            return Stream(self.experts(normed, weights, experts, base))
        part = None if self.shared is None else self.shared.part(normed)
        part = self.experts(normed, weights, experts, part)  # one sum over the ranks for all experts
        if then is None:
            return Stream(self._summing(part, stream.x))
        return Stream(*self._summing.with_norm(part, stream.x, then), then)
