"""Packed weights by themselves: packing, stacking, narrow dtypes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.fp8_weight import Fp8Weight
from sglang.srt.layers.quantization.int_weight import IntWeight
from sglang.srt.layers.quantization.packing import pack_words, unpack_words, words_of
from sglang.srt.layers.quantization.quant_weight import QuantWeight, stack

OUT, IN = 6, 64


def int_weight(seed: int, *, zero: bool = True, shuffled: bool = True) -> IntWeight:
    draw = torch.Generator().manual_seed(seed)
    q = torch.randint(0, 16, (OUT, IN), generator=draw).to(torch.uint8)
    return IntWeight(
        packed=pack_words(q, 4),
        scale=torch.rand(OUT, 2, generator=draw).half(),
        zero=torch.randint(0, 16, (OUT, 2), generator=draw).to(torch.uint8) if zero else None,
        group_of=(torch.randperm(IN, generator=draw) % 2).int() if shuffled else None,
        bits=4,
        in_features=IN,
    )


def fp8_weight(seed: int) -> Fp8Weight:
    draw = torch.Generator().manual_seed(seed)
    data = torch.randn(OUT, IN, generator=draw).to(torch.float8_e4m3fn)
    return Fp8Weight(data, torch.rand(2, 3, generator=draw), (4, 24))


def fp4_weight(seed: int, divides: bool = False) -> Fp4Weight:
    draw = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (OUT, IN // 2), generator=draw).to(torch.uint8)
    scale = torch.rand(OUT, IN // 16, generator=draw).to(torch.float8_e4m3fn)
    return Fp4Weight(packed, scale, torch.rand((), generator=draw) + 0.1, divides)


WEIGHTS = {
    "int4": lambda seed: int_weight(seed, zero=False, shuffled=False),
    "int4-all": int_weight,
    "fp8": fp8_weight,
    "nvfp4": fp4_weight,
    "nvfp4-divided": lambda seed: fp4_weight(seed, divides=True),
}


@given(st.sampled_from((4, 8)), st.integers(1, 70), st.integers(1, 5), st.integers(0, 2**31))
def test_packing_is_compressed_tensors(bits: int, count: int, rows: int, seed: int) -> None:
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    values = torch.randint(0, 2**bits, (rows, count), generator=torch.Generator().manual_seed(seed))
    packed = pack_words(values.to(torch.uint8), bits)
    assert packed.shape == (rows, words_of(count, bits))
    assert torch.equal(unpack_words(packed, bits, count), values.to(torch.uint8))
    theirs = pack_to_int32((values - 2 ** (bits - 1)).to(torch.int8), bits)
    assert torch.equal(unpack_words(theirs, bits, count), values.to(torch.uint8))
    assert torch.equal(packed, theirs)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_stack_is_its_matrices(name: str) -> None:
    parts: list[QuantWeight] = [WEIGHTS[name](seed) for seed in range(3)]
    stacked = stack(parts)
    assert stacked.shape == (3, OUT, IN)
    assert stacked.packed_bytes == sum(part.packed_bytes for part in parts)
    assert torch.equal(
        stacked.dequantise(torch.float64), torch.stack([p.dequantise(torch.float64) for p in parts])
    )


def test_only_one_format_is_stacked() -> None:
    with pytest.raises(ValueError, match="one shape and format"):
        stack([int_weight(0), int_weight(1, zero=False)])


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_dtype_is_the_exact_value_rounded(name: str) -> None:
    weight: QuantWeight = WEIGHTS[name](7)
    exact = weight.dequantise(torch.float64)
    assert torch.equal(weight.dequantise(torch.float32), exact.float())
    assert torch.equal(weight.dequantise(torch.bfloat16), exact.float().bfloat16())
    assert exact.unique().numel() > OUT * IN / 8
