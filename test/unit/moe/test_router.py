"""Routers of every family against transformers' modules; biases and negative scores included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError
from sglang.srt.configs.moe_config import MoEConfig, read_moe
from sglang.srt.layers.moe.router import route

HIDDEN, EXPERTS, TOKENS = 16, 16, 40

QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": 3, "moe_intermediate_size": 8}
DEEPSEEK = {
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3": ("qwen3_moe.Qwen3Moe", "Qwen3MoeForCausalLM", QWEN | {"norm_topk_prob": True}),
    "qwen3-raw": ("qwen3_moe.Qwen3Moe", "Qwen3MoeForCausalLM", QWEN | {"norm_topk_prob": False}),
    "v2-greedy": ("deepseek_v2.DeepseekV2", "DeepseekV2ForCausalLM", DEEPSEEK | {"topk_method": "greedy"}),
    "v2-groups": (
        "deepseek_v2.DeepseekV2",
        "DeepseekV2ForCausalLM",
        DEEPSEEK | {"topk_method": "group_limited_greedy"},
    ),
    "v3": ("deepseek_v3.DeepseekV3", "DeepseekV3ForCausalLM", DEEPSEEK | {"norm_topk_prob": True}),
    "v3-raw": ("deepseek_v3.DeepseekV3", "DeepseekV3ForCausalLM", DEEPSEEK | {"norm_topk_prob": False}),
    "glm4": ("glm4_moe.Glm4Moe", "Glm4MoeForCausalLM", DEEPSEEK | {"norm_topk_prob": True}),
    "kimi": (
        "deepseek_v3.DeepseekV3",
        "DeepseekV3ForCausalLM",
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "norm_topk_prob": True},
    ),
}


def their_router(name: str, fields: dict[str, Any]) -> torch.nn.Module:
    import importlib

    module_name, prefix = name.split(".")
    module = importlib.import_module(f"transformers.models.{module_name}.modeling_{module_name}")
    router = getattr(module, f"{prefix}TopKRouter", None) or getattr(module, f"{prefix}TopkRouter")
    known = {"hidden_size": HIDDEN, "num_experts": EXPERTS, "num_local_experts": EXPERTS}
    made: torch.nn.Module = router(SimpleNamespace(**(fields | known)))
    return made


def config_of(architecture: str, fields: dict[str, Any]) -> MoEConfig:
    config = read_moe(ConfigFields(fields, "config.json"), architecture, 4)
    assert config is not None
    return config


def dense_weights(weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
    """[T, E]: an order of the chosen experts means nothing."""
    return torch.zeros(len(weights), EXPERTS, dtype=weights.dtype).scatter_(1, experts, weights)


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**31), spread=st.sampled_from([0.1, 1.0, 8.0]), shift=st.sampled_from([-1.5, 0.0])
)
def test_equal_to_transformers(family: str, seed: int, spread: float, shift: float) -> None:
    """``shift`` makes biased scores negative: experts of lost groups must lose to them all the same."""
    name, architecture, fields = FAMILIES[family]
    config = config_of(architecture, fields)
    theirs = their_router(name, fields)
    g = torch.Generator().manual_seed(seed)
    x, gate = torch.randn(TOKENS, HIDDEN, generator=g), torch.randn(EXPERTS, HIDDEN, generator=g) * spread
    theirs.weight.data = gate  # type: ignore[union-attr]
    bias = None
    if config.has_bias:
        bias = torch.randn(EXPERTS, generator=g) + shift
        theirs.e_score_correction_bias.copy_(bias)  # type: ignore[operator, union-attr]
    with torch.no_grad():
        _, their_weights, their_experts = theirs(x)
    weights, experts = route(x @ gate.T, bias, config)
    assert weights.shape == experts.shape == (TOKENS, 3) and weights.dtype == torch.float32
    expected = dense_weights(their_weights, their_experts)
    assert torch.allclose(dense_weights(weights, experts), expected, rtol=1e-5, atol=1e-7)


def test_float64_stays() -> None:
    weights, _ = route(torch.randn(3, EXPERTS, dtype=torch.float64), None, config_of(*FAMILIES["qwen3"][1:]))
    assert weights.dtype == torch.float64
    assert torch.allclose(weights.sum(1), torch.ones(3, dtype=torch.float64), rtol=1e-15)


def test_which_layers_have_experts() -> None:
    fields = QWEN | {"mlp_only_layers": [1], "decoder_sparse_step": 2}
    config = read_moe(ConfigFields(fields, "x"), "Qwen3MoeForCausalLM", 8)
    assert config is not None and config.layers == (3, 5, 7)
    deepseek = read_moe(ConfigFields(DEEPSEEK, "x"), "DeepseekV3ForCausalLM", 4)
    assert deepseek is not None and deepseek.layers == (1, 2, 3)
    kinds = {n: v for n, v in DEEPSEEK.items() if n != "first_k_dense_replace"}
    kinds["mlp_layer_types"] = ["dense", "dense", "sparse", "sparse"]
    named = read_moe(ConfigFields(kinds, "x"), "GlmMoeDsaForCausalLM", 4)
    assert named is not None and named.layers == (2, 3)
    assert (
        read_moe(ConfigFields(DEEPSEEK | {"first_k_dense_replace": 4}, "x"), "DeepseekV3ForCausalLM", 4)
        is None
    )
    assert read_moe(ConfigFields(QWEN, "x"), "LlamaForCausalLM", 4) is None


@pytest.mark.parametrize(
    "architecture,change,message",
    [
        ("DeepseekV3ForCausalLM", {"n_group": 3}, "16 experts can't be split into 3 groups"),
        ("DeepseekV3ForCausalLM", {"topk_group": 5}, "topk_group 5 is more than n_group 4"),
        ("DeepseekV3ForCausalLM", {"num_experts_per_tok": 9}, "9 experts a token, but only 8"),
        ("DeepseekV3ForCausalLM", {"n_group": 16, "topk_group": 8}, "a group of experts needs two"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("DeepseekV3ForCausalLM", {"first_k_dense_replace": -1}, "must be an integer of 0 or more, not -1"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob is not supported with softmax"),
        ("DeepseekV2ForCausalLM", {"moe_intermediate_size": None}, "lacks 'moe_intermediate_size'"),
    ],
)
def test_what_is_refused(architecture: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        read_moe(ConfigFields(DEEPSEEK | change, "config.json"), architecture, 4)
