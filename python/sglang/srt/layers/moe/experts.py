"""The experts' products in plain PyTorch: the way of CPUs, and the reference of kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from sglang.srt.layers.activation import silu_and_mul


class Experts:
    """Gated MLPs side by side. Tokens are sorted by expert; one product for each expert that is hit.

    What a token gets is added up in the order of its experts' numbers, whoever is beside it.
    """

    def __init__(
        self,
        gate_up: torch.Tensor,  # [E, 2 * I, H], gate first
        down: torch.Tensor,  # [E, H, I]
        gate_up_bias: torch.Tensor | None = None,  # [E, 2 * I]
        down_bias: torch.Tensor | None = None,  # [E, H]
        activation: Callable[[torch.Tensor], torch.Tensor] = silu_and_mul,  # [..., 2 * I] -> [..., I]
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate_up_bias = gate_up_bias
        self.down_bias = down_bias
        self.activation = activation
        self.num_experts = gate_up.shape[0]
        tensors = [t for t in (gate_up, down, gate_up_bias, down_bias) if t is not None]
        self.weight_bytes = sum(t.numel() * t.element_size() for t in tensors)

    def __call__(
        self,
        x: torch.Tensor,  # [T, H], normed
        weights: torch.Tensor,  # [T, k] float32 or float64
        experts: torch.Tensor,  # [T, k] int64, no expert twice in a row
        base: torch.Tensor | None = None,  # [T, H], added
    ) -> torch.Tensor:
        """The weighted sum of each token's experts: [T, H] of x's dtype, summed in that of the weights."""
        top_k = experts.shape[1]
        by_expert = experts.flatten().argsort(stable=True)  # [T * k]
        counts = experts.flatten().bincount(minlength=self.num_experts).tolist()
        tokens, weights = by_expert // top_k, weights.flatten()[by_expert, None]
        out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
        begin = 0
        for expert, count in enumerate(counts):
            if count == 0:
                continue
            end = begin + count
            rows = tokens[begin:end]
            out.index_add_(0, rows, self.one(expert, x[rows]).to(out.dtype) * weights[begin:end])
            begin = end
        out = out.to(x.dtype)
        return out if base is None else base + out

    def one(self, expert: int, x: torch.Tensor) -> torch.Tensor:
        """x: [N, H] -> [N, H], what one expert makes of it."""
        first = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        last = None if self.down_bias is None else self.down_bias[expert]
        gated = self.activation(F.linear(x, self.gate_up[expert], first))  # [N, I]
        return F.linear(gated, self.down[expert], last)
