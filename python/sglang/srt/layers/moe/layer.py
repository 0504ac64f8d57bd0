"""A mixture of experts in the place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from sglang.srt.distributed.tensor_parallel import Join
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm


class MLP(Protocol):
    """What a layer has after its attention: plain, or a mixture of experts."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, norm: RMSNorm, live: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, H] residual stream -> [T, H], the MLP of ``norm(x)`` added; x is used up.

        live: [T] bool; what the others get does not matter, and should cost nothing. None: all.
        """
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

    def __call__(self, x: torch.Tensor, norm: RMSNorm, live: torch.Tensor | None = None) -> torch.Tensor:
        """x: [T, H] residual stream -> [T, H], shared and chosen experts of ``norm(x)`` added."""
        normed = self.router.normed(x, norm)
        weights, experts = self.router(normed, live)
        if self._summing is not None:  # one sum over the ranks for all experts
            base = None if self.shared is None else self.shared.part(normed)
            return self._summing(self.experts(normed, weights, experts, base), x)
        base = x if self.shared is None else self.shared(x, norm)
        return self.experts(normed, weights, experts, base)
