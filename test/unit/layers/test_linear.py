"""Linear layers: packed and plain ones are the same map."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from sglang.srt.layers.linear import Linear, can_pack


@pytest.mark.parametrize("rows", [1, 2, 4, 16, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_packed_equals_plain(rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(96, 80), torch.randn(rows, 80)
    b = torch.randn(96) if bias else None
    expected = F.linear(x.double(), weight.double(), None if b is None else b.double()).float()
    layer = Linear(weight.clone(), b)
    assert layer.packed == can_pack(weight)
    assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert torch.allclose(Linear(weight, b, pack=False)(x), expected, rtol=1e-5, atol=1e-5)


def test_inputs_that_are_views() -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(24, 16), torch.randn(5, 64)[:, 16:32]
    assert torch.allclose(Linear(weight.clone())(x), F.linear(x, weight), atol=1e-5)


def test_a_packed_weight_is_the_only_copy() -> None:
    layer = Linear(torch.randn(8, 8))
    if layer.packed:
        assert layer.weight.is_mkldnn
    assert layer.weight_bytes == 8 * 8 * 4
    assert not any(isinstance(v, torch.Tensor) and v is not layer.weight for v in vars(layer).values())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_are_plain(dtype: torch.dtype) -> None:
    weight, x = torch.randn(8, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    layer = Linear(weight)
    assert not layer.packed
    assert torch.equal(layer(x), F.linear(x, weight))


@pytest.mark.parametrize(
    "dtype,out",
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
@pytest.mark.parametrize("pack", [True, False])  # False: as in a build without oneDNN
def test_float_output(dtype: torch.dtype, out: torch.dtype, pack: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(8, 4, dtype=dtype), torch.randn(3, 4, dtype=dtype)
    logits = Linear(weight.clone(), float_output=True, pack=pack)(x)
    assert logits.dtype == out
    assert torch.allclose(logits.double(), F.linear(x.double(), weight.double()), atol=1e-5)
