"""A mixture of experts in the place of a layer's MLP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.distributed.tensor_parallel import Join
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.router import route
from sglang.srt.layers.norm import RMSNorm


class MLP(Protocol):
    """What a layer has after its attention: plain, or a mixture of experts."""

    @property
    def weight_bytes(self) -> int: ...

    def __call__(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x: [T, H] residual stream -> [T, H], the MLP of ``norm(x)`` added; x is used up."""
        ...

    def linears(self) -> Sequence[Linear]: ...


class SharedMLP(MLP, Protocol):
    """Experts that every token goes to."""

    def part(self, normed: torch.Tensor) -> torch.Tensor:
        """normed: [T, H] -> [T, H], what this rank adds to the sum of all."""
        ...


class MoE:
    """Router, experts, and the shared experts if there are any (an ``MLP`` that adds itself first)."""

    def __init__(
        self,
        config: MoEConfig,
        gate: torch.Tensor,  # [E, H] float32 at least: a router's choice must not hang on rounding
        bias: torch.Tensor | None,  # [E] float32 at least
        experts: Experts,
        shared: SharedMLP | None,
        gate_bias: torch.Tensor | None = None,  # [E], of the logits; ``bias`` is of the scores to choose by
        summing: Join | None = None,  # of the ranks' parts; None: there is one rank
    ) -> None:
        self._summing = summing
        self.config = config
        self.gate = gate
        self.bias = bias
        self.gate_bias = gate_bias
        self.experts = experts
        self.shared = shared

    @property
    def weight_bytes(self) -> int:
        own = [t for t in (self.gate, self.bias, self.gate_bias) if t is not None]
        shared = 0 if self.shared is None else self.shared.weight_bytes
        return sum(t.numel() * t.element_size() for t in own) + self.experts.weight_bytes + shared

    def linears(self) -> Sequence[Linear]:
        return [] if self.shared is None else self.shared.linears()

    def __call__(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        """x: [T, H] residual stream -> [T, H], shared and chosen experts of ``norm(x)`` added."""
        normed = norm(x)
        logits = F.linear(normed.to(self.gate.dtype), self.gate, self.gate_bias)  # [T, E]
        weights, experts = route(logits, self.bias, self.config)
        routed = self.experts(normed, weights, experts).to(x.dtype)
        if self._summing is not None:  # one sum over the ranks for all experts
            mine = routed if self.shared is None else routed + self.shared.part(normed)
            return self._summing(mine, x)
        return (x if self.shared is None else self.shared(x, norm)) + routed
