"""Models whose linear layers stay packed (over sgl_kernel's references) against the dequantised ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.quantise import FORMATS, write_quantised
from helpers.run_model import Driver, load_target
from helpers.tiny_models import write_tiny_llama, write_tiny_qwen2
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.packed_linear import PackedLinear
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.fp8_weight import Fp8Weight
from sglang.srt.layers.quantization.int_weight import IntWeight
from sglang.srt.layers.quantization.packed_matrix import matrix_of
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.models import packed

# Format -> packed layers of a decoder layer: qkv, o, gate and up, down.
KEPT = {
    "int4": 4,
    "int4-rows": 4,
    "ct-fp8-rows": 4,
    "ct-fp8-block": 4,
    "fp8": 4,
    "fbgemm": 4,
    "ct-nvfp4": 3,  # q, k and v have scales of the whole that differ
    "awq": 0,  # zero points
    "gptq-8": 0,
    "fp8-block": 0,  # 48 columns a block, no multiple of 64
}


def drive(folder: Path) -> torch.Tensor:
    driver = Driver(load_target(folder, torch.float32), 16, torch.float32)
    ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2))
    return torch.cat([driver.prefill(ids[:20]), driver.decode(ids[20:21]), driver.decode(ids[21:])])


@pytest.mark.parametrize(
    "name",
    [n if n in ("int4", "fp8", "ct-nvfp4") else pytest.param(n, marks=pytest.mark.long) for n in KEPT],
)
def test_packed_layers_equal_the_dequantised_ones(tmp_path: Path, name: str) -> None:
    writer = write_tiny_qwen2 if name in ("int4", "fbgemm") else write_tiny_llama  # biases of q, k and v
    source = writer(tmp_path / "source", seed=3, num_hidden_layers=2, hidden_size=128)
    quantised, plain = write_quantised(source, tmp_path, replace(FORMATS[name], extra={}))
    expected = drive(plain)
    with mock.patch.object(packed, "wants_kernels", lambda device: True):
        model = load_target(quantised, torch.float32)
        got = drive(quantised)
    kinds = Counter(type(linear) for linear in model.linears())
    assert kinds[PackedLinear] == 2 * KEPT[name]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def draw(kind: str, rows: int, g: torch.Generator) -> QuantWeight:
    """64 columns."""
    if kind == "int4":
        words = torch.randint(-(2**31), 2**31, (rows, 8), generator=g).int()
        return IntWeight(words, torch.rand(rows, 2, generator=g), None, None, 4, 64)
    if kind == "nvfp4":
        codes = torch.randint(0, 256, (rows, 32), generator=g).to(torch.uint8)
        scale = (torch.rand(rows, 4, generator=g) + 0.1).to(torch.float8_e4m3fn)
        return Fp4Weight(codes, scale, torch.tensor(0.5))
    data = torch.randn(rows, 64, generator=g).to(torch.float8_e4m3fn)
    if kind == "fp8":
        return Fp8Weight(data, torch.rand(1, 1, generator=g), (rows, 64))
    return Fp8Weight(data, torch.rand(-(-rows // 8), 1, generator=g), (8, 64))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    kind=st.sampled_from(["int4", "nvfp4", "fp8", "fp8-block"]),
    sizes=st.lists(st.integers(1, 5).map(lambda n: 8 * n), min_size=1, max_size=3),
    gated=st.booleans(),
    last=st.integers(0, 7),
)
def test_parts_become_one_matrix(seed: int, kind: str, sizes: list[int], gated: bool, last: int) -> None:
    """``last``: rows of the last part beyond whole blocks."""
    g = torch.Generator().manual_seed(seed)
    sizes = [sizes[0] + last] * 2 if gated else [*sizes[:-1], sizes[-1] + last]
    weights = [draw(kind, rows, g) for rows in sizes]
    matrix = matrix_of(weights, gated)
    assert matrix is not None
    expected = torch.cat([weight.dequantise(torch.float64) for weight in weights])
    torch.testing.assert_close(matrix.dequantise(0, torch.float64), expected, rtol=1e-6, atol=0)


def test_parts_that_do_not_fit_together() -> None:
    g = torch.Generator().manual_seed(0)
    assert matrix_of([draw("fp8-block", 12, g), draw("fp8-block", 8, g)], gated=False) is None
    four = draw("nvfp4", 8, g)
    assert isinstance(four, Fp4Weight)
    other = replace(four, global_scale=torch.tensor(0.25))
    assert matrix_of([four, other], gated=False) is None and matrix_of([four, other], gated=True) is not None
