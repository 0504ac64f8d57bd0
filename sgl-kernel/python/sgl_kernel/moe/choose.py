"""Which experts each token goes to, and with what weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    top_k: int
    sigmoid: bool  # scores are sigmoids of the logits, else their softmax
    renormalise: bool  # weights are made to sum to 1
    scaling: float = 1.0  # weights are multiplied by it at the end
    num_groups: int = 1  # of neighbouring experts
    topk_groups: int = 0  # only experts of the best groups are chosen; 0: groups mean nothing
    by_two: bool = False  # a group counts by the sum of its two best experts, else by its best


def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rule: ChoiceRule,
    *,
    live: torch.Tensor | None = None,
    pdl: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [T, k] (float32) and experts [T, k] int32, best first; of equal ones the lower number first.

    logits: [T, E] float32; bias: [E] float32, added to the scores to choose by, not to the weights; live:
    [T] bool, tokens without it get experts -1. A token whose logits are not numbers gets k different
    experts all the same, and weights that are not numbers.
    """
    num_tokens, top_k = logits.shape[0], rule.top_k
    assert logits.shape[1] % rule.num_groups == 0 and logits.is_contiguous()
    if not use_kernel(logits):
        return choose_experts_ref(logits, bias, rule, live)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    if num_tokens:
        choose_launch(logits, bias, rule, live, weights, experts, pdl).run()
    return weights, experts


def choose_experts_ref(
    logits: torch.Tensor, bias: torch.Tensor | None, rule: ChoiceRule, live: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights have the logits' dtype."""
    scores = logits.sigmoid() if rule.sigmoid else logits.softmax(dim=-1)
    choice = (scores if bias is None else scores + bias).nan_to_num(
        float("-inf"), float("inf"), float("-inf")
    )
    if rule.topk_groups:
        grouped = choice.unflatten(1, (rule.num_groups, -1))  # [T, G, E / G]
        of_group = grouped.topk(2).values.sum(dim=-1) if rule.by_two else grouped.amax(dim=-1)
        lost = torch.ones_like(of_group, dtype=torch.bool).scatter_(
            1, best(of_group, rule.topk_groups), False
        )
        choice = grouped.masked_fill(lost[:, :, None], float("-inf")).flatten(1)
    experts = best(choice, rule.top_k)
    weights = scores.gather(1, experts)
    if rule.renormalise:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if live is not None:
        experts = experts.masked_fill(~live[:, None], -1)
    return weights * rule.scaling, experts.int()


def best(values: torch.Tensor, count: int) -> torch.Tensor:
    """values: [T, n] -> [T, count] int64: places of the largest, of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def choose_launch(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    rule: ChoiceRule,
    live: torch.Tensor | None,
    weights: torch.Tensor,
    experts: torch.Tensor,
    pdl: bool,
) -> Launch:
    from sgl_kernel.moe.choosing.kernels import choose_kernel

    num_tokens, num_experts = logits.shape
    groups = rule.num_groups if rule.topk_groups else 1
    return Launch(
        choose_kernel,
        (num_tokens,),
        (
            logits, logits if bias is None else bias, logits if live is None else live, weights, experts,
            rule.scaling,
        ),
        {
            "E": num_experts,
            "GROUPS": groups,
            "GROUPS_PAD": next_power_of_2(groups),
            "SIZE_PAD": next_power_of_2(num_experts // groups),
            "TOPK_GROUPS": rule.topk_groups,
            "TOP2": rule.by_two,
            "TOP_K": rule.top_k,
            "SLOTS": next_power_of_2(rule.top_k),
            "SIGMOID": rule.sigmoid,
            "RENORMALISE": rule.renormalise,
            "BIAS": bias is not None,
            "MASKED": live is not None,
            "PDL": pdl,
        },
        num_warps=1,  # every round of the choice is a reduction: within a warp it waits for nobody
        pdl=pdl,
    )  # fmt: skip
