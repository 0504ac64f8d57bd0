"""RMSNorm, rope and silu-mul against plain formulas and transformers' tables."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.tiny_models import LLAMA3_ROPE

from sglang.srt.configs.config_fields import ConfigFields
from sglang.srt.configs.rope_config import RopeConfig, read_rope
from sglang.srt.layers.activation import silu_and_mul
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.rope import Rope, inverse_frequencies

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 64).to(dtype) * 3, torch.randn(64).to(dtype)
    wide = x if dtype == torch.float64 else x.float()
    normed = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    expected = normed.to(dtype) * weight  # rounded before the weight
    got = RMSNorm(weight, 1e-5)(x)
    assert got.dtype == dtype
    tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 0.0}[dtype]
    assert torch.allclose(got, expected, rtol=tolerance, atol=tolerance)


def test_norm_with_a_weight_for_each_head() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    got = RMSNorm(weight, 1e-6)(x)
    for h in range(3):
        assert torch.allclose(got[:, h], RMSNorm(weight[h].contiguous(), 1e-6)(x[:, h]), atol=1e-6)


def test_silu_and_mul() -> None:
    x = torch.randn(3, 10, dtype=torch.float64)
    gate, up = x[:, :5], x[:, 5:]
    assert torch.allclose(silu_and_mul(x.clone()), gate * gate.sigmoid() * up)


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        LLAMA3_ROPE,
        {"rope_type": "linear", "factor": 3.0},
        YARN,
        YARN | {"mscale": 1.0, "mscale_all_dim": 0.5},
    ],
    ids=["default", "llama3", "linear", "yarn", "yarn-mscale"],
)
def test_tables_are_those_of_transformers(scaling: dict[str, Any] | None) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    raw = {"rope_theta": 10000.0, "rope_scaling": scaling}
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=64,
            num_attention_heads=2,
            max_position_embeddings=512,
            rope_parameters=(scaling or {"rope_type": "default"}) | {"rope_theta": 10000.0},
        )
    )
    positions = torch.tensor([0, 1, 63, 64, 65, 200, 400])
    cos, sin = theirs(torch.zeros(1, 1), positions[None])
    rope = Rope(read_rope(ConfigFields(raw, "test"), 512), 32, 512, torch.float32, "cpu")
    angles = rope.at(positions)
    assert torch.allclose(angles.cos[:, 0], cos[0], atol=3e-5)
    assert torch.allclose(angles.sin[:, 0, 16:], sin[0, :, 16:], atol=3e-5)
    assert torch.equal(angles.sin[:, 0, :16], -angles.sin[:, 0, 16:])


def test_llama3_has_three_bands() -> None:
    config = RopeConfig("llama3", 10000.0, 8.0, 64, 1.0, 4.0)
    ratio = inverse_frequencies(config, 32) / inverse_frequencies(RopeConfig(), 32)
    assert ratio[0] == 1.0 and abs(ratio[-1] - 1 / 8) < 1e-12
    assert ((ratio > 0.126) & (ratio < 0.999)).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rope = Rope(RopeConfig(theta=100.0), 8, 50, dtype, "cpu")
    x = torch.randn(3, 2, 8).to(dtype)
    positions = torch.tensor([0, 7, 49])
    got = rope.at(positions).rotate(x)
    assert got.dtype == dtype and torch.equal(got[0], x[0])
    # each pair (i, i + 4) is turned by position / 100 ** (i / 4)
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double())
    turn = positions.double()[:, None] * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, None]
    expected = torch.cat((turned.real, turned.imag), -1)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert torch.allclose(got.double(), expected, atol=tolerance)


def test_scores_depend_on_the_distance_alone() -> None:
    rope = Rope(RopeConfig(), 16, 200, torch.float64, "cpu")
    q, k = torch.randn(1, 1, 16, dtype=torch.float64), torch.randn(1, 1, 16, dtype=torch.float64)

    def score(i: int, j: int) -> float:
        turned = rope.at(torch.tensor([i])).rotate(q), rope.at(torch.tensor([j])).rotate(k)
        return float((turned[0] * turned[1]).sum())

    assert abs(score(20, 3) - score(150, 133)) < 1e-12
