"""Which experts a token goes to, and with what weights.

Sources: transformers 5.17 ``qwen3_moe``, ``deepseek_v2``, ``deepseek_v3``, ``glm4_moe``. Of the older
DeepSeek code one thing differs: experts of groups that lost count as minus infinity here, not as 0, which
matters where a biased score is negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm

_NO_ZERO = 1e-20  # what transformers adds to the sum of weights


def route(
    logits: torch.Tensor,  # [T, E] float32 (float64 in a float64 model)
    bias: torch.Tensor | None,  # [E], the same dtype
    config: MoEConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, k] of the logits' dtype and experts [T, k] int64, best first, of equals the lower number.

    The bias helps to choose; a weight is the expert's own score.
    """
    scores = logits.softmax(dim=-1) if config.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if config.group_score is not None:
        choice = _of_best_groups(choice, config)
    experts = _best(choice, config.top_k)
    weights = scores.gather(1, experts)
    if config.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + _NO_ZERO)
    return weights * config.scaling_factor, experts


def _of_best_groups(choice: torch.Tensor, config: MoEConfig) -> torch.Tensor:
    """choice: [T, E] -> the same, minus infinity in groups that are not among the best."""
    grouped = choice.view(choice.shape[0], config.num_groups, -1)  # [T, G, E / G]
    if config.group_score == "max":
        of_group = grouped.amax(dim=-1)  # [T, G]
    else:
        of_group = grouped.topk(2, dim=-1).values.sum(dim=-1)
    best = _best(of_group, config.topk_groups)  # [T, topk_groups]
    lost = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(lost[:, :, None], float("-inf")).flatten(1)


def _best(values: torch.Tensor, count: int) -> torch.Tensor:
    """values: [T, n] -> [T, count] int64: places of the largest, of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


class TorchRouter:
    """``Router`` in plain PyTorch: the way of CPUs."""

    def __init__(
        self,
        config: MoEConfig,
        gate: torch.Tensor,  # [E, H] float32 at least: a router's choice must not hang on rounding
        bias: torch.Tensor | None,  # [E] float32 at least
        gate_bias: torch.Tensor | None = None,  # [E], of the logits; ``bias`` is of the scores to choose by
    ) -> None:
        self.config = config
        self.gate = gate
        self.bias = bias
        self.gate_bias = gate_bias
        own = [t for t in (gate, bias, gate_bias) if t is not None]
        self.weight_bytes = sum(t.numel() * t.element_size() for t in own)

    def linears(self) -> Sequence[Linear]:
        return []

    def normed(self, x: torch.Tensor, norm: RMSNorm) -> torch.Tensor:
        return norm(x)

    def __call__(
        self, normed: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """normed: [T, H] -> weights and experts, [T, k]. ``live`` is for padded steps: a CPU has none."""
        logits = F.linear(normed.to(self.gate.dtype), self.gate, self.gate_bias)  # [T, E]
        return route(logits, self.bias, self.config)
