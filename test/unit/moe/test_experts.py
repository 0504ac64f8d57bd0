"""The experts' products against a plain sum over tokens, and a layer's router in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.moe_config import MoEConfig
from sglang.srt.layers.moe.experts import Experts
from sglang.srt.layers.moe.layer import MoE
from sglang.srt.layers.moe.router import TorchRouter
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.layers.stream import Stream

HIDDEN, SIZE, NUM = 12, 7, 6


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expert(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up[:SIZE] @ x, gate_up[SIZE:] @ x
    return down @ (F.silu(gate) * up)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), tokens=st.integers(0, 9), top_k=st.integers(1, NUM))
def test_the_weighted_sum_of_chosen_experts(seed: int, tokens: int, top_k: int) -> None:
    gate_up, down = draw(seed, NUM, 2 * SIZE, HIDDEN), draw(seed + 1, NUM, HIDDEN, SIZE)
    x, weights = draw(seed + 2, tokens, HIDDEN), draw(seed + 3, tokens, top_k)
    chosen = draw(seed + 4, tokens, NUM).argsort(dim=1)[:, :top_k]
    got = Experts(gate_up, down)(x, weights, chosen)
    assert got.shape == (tokens, HIDDEN)
    for t in range(tokens):
        parts = [weights[t, j] * expert(x[t], gate_up[e], down[e]) for j, e in enumerate(chosen[t].tolist())]
        assert torch.allclose(got[t], torch.stack(parts).sum(0), rtol=1e-11, atol=1e-11)


def test_a_broken_token_harms_no_other() -> None:
    experts = Experts(draw(0, NUM, 2 * SIZE, HIDDEN), draw(1, NUM, HIDDEN, SIZE))
    x = draw(2, 5, HIDDEN)
    weights, chosen = torch.ones(5, 2, dtype=torch.float64), torch.tensor([[0, 1]] * 5)
    before = experts(x, weights, chosen)
    x[3] = float("nan")
    after = experts(x, weights, chosen)
    assert after[3].isnan().all()
    kept = [0, 1, 2, 4]
    assert torch.equal(after[kept], before[kept])


def test_a_bfloat16_layer_routes_in_float32() -> None:
    """Logits that bfloat16 can't tell apart: the better expert is chosen all the same."""
    config = MoEConfig(num_experts=2, top_k=1, intermediate_size=SIZE, layers=(0,))
    gate = torch.ones(2, HIDDEN)
    gate[1] += 2.0**-12
    gate_up = draw(0, 2, 2 * SIZE, HIDDEN).bfloat16()
    down = torch.zeros(2, HIDDEN, SIZE, dtype=torch.bfloat16)
    down[1] = 1.0  # expert 0 gives nothing
    layer = MoE(TorchRouter(config, gate, None), Experts(gate_up, down), None)
    norm = RMSNorm(torch.ones(HIDDEN, dtype=torch.bfloat16), 1e-6)
    x = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    assert not torch.equal(layer(Stream(x.clone()), norm).x, x)
    assert layer.weight_bytes == gate.numel() * 4 + 2 * (gate_up.numel() + down.numel())
