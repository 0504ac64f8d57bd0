"""What an indexer's products become: the reference against the model's own code, the kernel against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton", reason="kernels need triton")

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention.mla.indexing.prepare import (
    KeyNorm,
    Turn,
    prepare_index,
    prepare_keys,
    prepare_launch,
    prepare_ref,
)
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret
from sglang.srt.layers.attention.mla import in_halves
from sglang.srt.layers.rope import RopeAngles


class Tokens:
    """Of an indexer with h heads of d numbers, of which r are turned; rows of keys lie apart."""

    def __init__(self, tokens: int, heads: int, dim: int, rope: int, interleaved: bool) -> None:
        draw = torch.Generator().manual_seed(tokens + dim)
        angles = torch.randn(tokens, rope // 2, generator=draw)
        cos, sin = angles.cos(), angles.sin()
        self.turn = Turn(torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1), interleaved)
        self.norm = KeyNorm(torch.randn(dim, generator=draw), torch.randn(dim, generator=draw), 1e-6)
        self.q = torch.randn(tokens, heads, dim, generator=draw)
        self.weights = torch.randn(tokens, heads, generator=draw)
        self.k = torch.randn(tokens, 3 + dim, generator=draw)[:, 3:]


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_reference_is_what_the_model_does(interleaved: bool) -> None:
    given = Tokens(5, 3, 12, 8, interleaved)
    angles = RopeAngles(given.turn.cos[:, None], given.turn.sin[:, None])

    def turned(x: torch.Tensor) -> torch.Tensor:
        return angles.rotate(in_halves(x, 8) if interleaved else x)

    norm = given.norm
    normed = F.layer_norm(given.k, (12,), norm.weight, norm.bias, norm.eps)
    q, weights = given.q.clone(), given.weights.clone()
    k = prepare_index(q, weights, given.k, norm, given.turn, 0.25)
    torch.testing.assert_close(k, turned(normed[:, None])[:, 0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q, turned(given.q), rtol=1e-6, atol=1e-6)
    assert torch.equal(weights, given.weights * 0.25)
    assert torch.equal(prepare_keys(given.k, norm, given.turn), k)


def body_kernel() -> None:
    """Widths that fill no block, heads that fill none, all of a head turned, no token."""
    for tokens, heads, dim, rope, interleaved in (
        (3, 9, 24, 12, True), (2, 8, 16, 8, False), (1, 1, 8, 8, True), (0, 2, 8, 4, False),
    ):  # fmt: skip
        given = Tokens(tokens, heads, dim, rope, interleaved)
        q, weights = given.q.clone(), given.weights.clone()
        wanted = prepare_ref(q, weights, given.k, given.norm, given.turn, 0.5)
        own_q, own_weights = given.q.clone(), given.weights.clone()
        k = prepare_index(own_q, own_weights, given.k, given.norm, given.turn, 0.5)
        for got, expected in ((k, wanted), (own_q, q), (own_weights, weights)):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(
            prepare_keys(given.k, given.norm, given.turn), wanted, rtol=1e-5, atol=1e-5
        )


def test_the_kernel_equals_the_reference() -> None:
    interpret(__file__, "body_kernel")


@pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")
def test_real_sizes_fit(info: DeviceInfo) -> None:
    """GLM-5's and DeepSeek-V3.2's."""
    for heads, interleaved in ((32, True), (64, False)):
        q = torch.empty(4, heads, 128, dtype=torch.bfloat16, device="meta")
        k, out = (
            torch.empty(4, 128, dtype=q.dtype, device="meta"),
            torch.empty(4, 128, dtype=q.dtype, device="meta"),
        )
        vector = torch.empty(128, device="meta")
        angles = torch.empty(4, 64, device="meta")
        weights = torch.empty(4, heads, device="meta")
        turn = Turn(angles, angles, interleaved)
        launch = prepare_launch(q, weights, k, KeyNorm(vector, vector, 1e-6), turn, 0.5, out)
        check(launch, archs=(info.arch,))
