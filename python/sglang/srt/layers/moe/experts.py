"""The experts' products in plain PyTorch: the way of CPUs, and the reference of kernels."""

from __future__ import annotations

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
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.num_experts = gate_up.shape[0]
        self.weight_bytes = sum(t.numel() * t.element_size() for t in (gate_up, down))

    def __call__(
        self,
        x: torch.Tensor,  # [T, H], normed
        weights: torch.Tensor,  # [T, k] float32 or float64
        experts: torch.Tensor,  # [T, k] int64, no expert twice in a row
    ) -> torch.Tensor:
        """The weighted sum of each token's experts, [T, H] of the weights' dtype."""
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
            gated = silu_and_mul(F.linear(x[rows], self.gate_up[expert]))  # [count, I]
            given = F.linear(gated, self.down[expert]).to(out.dtype)
            out.index_add_(0, rows, given * weights[begin:end])
            begin = end
        return out
