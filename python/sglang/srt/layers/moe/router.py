"""Which experts a token goes to, and with what weights.

Sources: transformers 5.17 ``qwen3_moe``, ``deepseek_v2``, ``deepseek_v3``, ``glm4_moe``. Of the older
DeepSeek code one thing differs: experts of groups that lost count as minus infinity here, not as 0, which
matters where a biased score is negative.
"""

from __future__ import annotations

import torch

from sglang.srt.configs.moe_config import MoEConfig

_NO_ZERO = 1e-20  # what transformers adds to the sum of weights


def route(
    logits: torch.Tensor,  # [T, E] float32 (float64 in a float64 model)
    bias: torch.Tensor | None,  # [E], the same dtype
    config: MoEConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, k] of the logits' dtype and experts [T, k] int64, best first.

    The bias helps to choose; a weight is the expert's own score.
    """
    scores = logits.softmax(dim=-1) if config.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if config.group_score is not None:
        choice = _of_best_groups(choice, config)
    experts = choice.topk(config.top_k, dim=-1).indices
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
    best = of_group.topk(config.topk_groups, dim=-1).indices  # [T, topk_groups]
    lost = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(lost[:, :, None], float("-inf")).flatten(1)
