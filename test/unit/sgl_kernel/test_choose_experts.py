"""A router's choice: the kernel against its reference, with ties, groups, biases and broken tokens."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from sgl_kernel.moe.choose import ChoiceRule, choose_experts, choose_experts_ref, choose_launch
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret

RULES = (
    (ChoiceRule(3, sigmoid=False, renormalise=True), 16, False),
    (ChoiceRule(3, sigmoid=False, renormalise=False, scaling=16.0, num_groups=4, topk_groups=2), 16, False),
    (ChoiceRule(8, sigmoid=True, renormalise=True, scaling=2.8, num_groups=1), 24, True),
    (ChoiceRule(5, True, True, 2.5, num_groups=3, topk_groups=2, by_two=True), 24, True),
    (ChoiceRule(1, sigmoid=True, renormalise=False), 5, False),
    (ChoiceRule(6, sigmoid=False, renormalise=True), 6, True),
)


def body_rules() -> None:
    for i, (rule, num_experts, has_bias) in enumerate(RULES):
        generator = torch.Generator().manual_seed(i)
        logits = torch.randn(6, num_experts, generator=generator) * 3
        # Few values: ties within groups and between them; all equal; a broken token.
        logits[2] = torch.randint(-1, 2, (num_experts,), generator=generator).float()
        logits[3] = 0.0
        logits[4] = torch.nan
        logits[5, 0] = -0.0
        bias = torch.randint(-2, 3, (num_experts,), generator=generator) * 0.5 if has_bias else None
        for live in (None, torch.tensor([True, False, True, True, True, False])):
            weights, experts = choose_experts(logits, bias, rule, live=live)
            expected_weights, expected = choose_experts_ref(logits, bias, rule, live)
            assert torch.equal(experts, expected), (rule, experts, expected)
            torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-7, equal_nan=True)
            assert all(len(set(row)) == rule.top_k for row in experts[[2, 3, 4]].tolist())
            assert weights[4].isnan().all()


def test_the_kernel_equals_its_reference() -> None:
    interpret(__file__, "body_rules")


@pytest.mark.parametrize(
    "rule,num_experts",
    [
        (ChoiceRule(8, True, True, 2.827), 384),
        (ChoiceRule(8, True, True, 2.5, num_groups=8, topk_groups=4, by_two=True), 256),
    ],
    ids=["kimi", "deepseek-v3"],
)
def test_real_sizes_fit(rule: ChoiceRule, num_experts: int) -> None:
    logits = torch.empty(32, num_experts, device="meta")
    weights = torch.empty(32, rule.top_k, device="meta")
    live = torch.empty(32, dtype=torch.bool, device="meta")
    check(choose_launch(logits, logits[0], rule, live, weights, weights.int(), True))
