"""Heads that are turned in part, in the order in which kernels turn them whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers.quantise import FORMATS, Format, fp8_block, write_quantised
from helpers.run_model import Driver, load_target
from helpers.tiny_moe import write_tiny_glm4_moe
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.rope_config import RopeConfig
from sglang.srt.distributed.shares import Span
from sglang.srt.layers.packed_linear import PackedLinear
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.fp8_weight import Fp8Weight
from sglang.srt.layers.quantization.int_weight import IntWeight
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.layers.rope import Rope
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import Part
from sglang.srt.models import packed
from sglang.srt.models.partial_rope import in_order_of_kernels, order_of_dims

AS_ON_CUDA = mock.patch.object(packed, "wants_kernels", lambda device: True)


@settings(max_examples=60, deadline=None)
@given(
    half=st.integers(1, 8),
    stay=st.integers(0, 8),
    kind=st.sampled_from(["default", "yarn"]),
    seed=st.integers(0, 2**31),
)
def test_turned_whole_as_turned_in_part(half: int, stay: int, kind: str, seed: int) -> None:
    turned, size = 2 * half, 2 * (half + stay)
    config = RopeConfig(kind, theta=100.0, factor=4.0, original_max_positions=16)
    narrow = Rope(config, turned, 50, torch.float64, "cpu")
    wide = Rope(config, turned, 50, torch.float64, "cpu", size)
    order = order_of_dims(turned, size)
    assert sorted(order) == list(range(size))
    g = torch.Generator().manual_seed(seed)
    x, positions = torch.randn(3, 2, size, generator=g).double(), torch.randint(0, 50, (3,), generator=g)
    expected = narrow.at(positions).rotate(x)[..., order]
    assert torch.equal(wide.at(positions).rotate(x[..., order]), expected)
    assert torch.equal(wide.cos[:, : size // 2], wide.cos[:, size // 2 :])  # as the kernels take them
    assert torch.equal(wide.sin[:, : size // 2], -wide.sin[:, size // 2 :])


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["int4", "zeros", "nvfp4", "fp8", "fp8-rows", "fp8-block"]),
    height=st.integers(1, 9),
    seed=st.integers(0, 2**31),
)
def test_packed_rows_in_another_order(kind: str, height: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = 8
    weight: QuantWeight
    if kind in ("int4", "zeros"):
        words = torch.randint(-(2**31), 2**31, (rows, 8), generator=g).int()
        zero = torch.randint(0, 16, (rows, 2), generator=g).to(torch.uint8) if kind == "zeros" else None
        weight = IntWeight(words, torch.rand(rows, 2, generator=g), zero, None, 4, 64)
    elif kind == "nvfp4":
        codes = torch.randint(0, 256, (rows, 32), generator=g).to(torch.uint8)
        scale = (torch.rand(rows, 4, generator=g) + 0.1).to(torch.float8_e4m3fn)
        weight = Fp4Weight(codes, scale, torch.tensor(0.5))
    else:
        height = {"fp8": rows, "fp8-rows": 1}.get(kind, height)
        data = torch.randn(rows, 64, generator=g).to(torch.float8_e4m3fn)
        weight = Fp8Weight(data, torch.rand(-(-rows // height), 2, generator=g), (height, 32))
    order = torch.randperm(rows, generator=g)
    expected = weight.dequantise(torch.float64)[order]
    got = weight.with_rows(order)
    if got is not None:
        assert torch.equal(got.dequantise(torch.float64), expected)
    else:
        assert kind == "fp8-block" and 1 < height < rows
        assert not torch.equal(order // height, torch.arange(rows) // height)


def blocks(rows: int) -> Format:
    of = FORMATS["fp8-block"]
    return replace(of, config=of.config | {"weight_block_size": [rows, 64]}, pack=fp8_block(rows, 64))


PACKED = {
    "a block a head": (blocks(32), True),
    "a block of half a head": (blocks(16), False),  # rows would change their block
    "fp8": (FORMATS["fp8"], True),
    "int4": (FORMATS["int4"], True),
    "awq": (FORMATS["awq"], False),
}
"""Format, and whether q, k and v stay packed."""


@pytest.mark.parametrize(
    "name", [n if n.startswith("a block") else pytest.param(n, marks=pytest.mark.long) for n in PACKED]
)
def test_packed_heads_equal_the_dequantised_ones(tmp_path: Path, name: str) -> None:
    form, stays = PACKED[name]
    source = write_tiny_glm4_moe(tmp_path / "source", seed=3, num_hidden_layers=2, hidden_size=128)
    quantised, plain = write_quantised(source, tmp_path, replace(form, extra={}))

    def drive(folder: Path) -> torch.Tensor:
        driver = Driver(load_target(folder, torch.float32), 16, torch.float32)
        ids = torch.randint(0, 256, (30,), generator=torch.Generator().manual_seed(2))
        return torch.cat([driver.prefill(ids[:20]), driver.decode(ids[20:21]), driver.decode(ids[21:])])

    expected = drive(plain)
    with AS_ON_CUDA:
        qkv = load_target(quantised, torch.float32).layers[0].linears()[0]
        got = drive(quantised)
    assert isinstance(qkv, PackedLinear) is stays
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_rank_s_heads_are_the_whole_s(tmp_path: Path) -> None:
    folder = write_tiny_glm4_moe(tmp_path, seed=1)
    config = ModelConfig.from_folder(folder)
    sizes = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads, "v_proj": config.num_kv_heads}
    plain = open_source(folder, "auto", torch.float32, "cpu", None)
    with AS_ON_CUDA:
        source = in_order_of_kernels(plain, config)
    assert source is not plain and in_order_of_kernels(plain, config) is plain
    order = order_of_dims(config.head_dim // 2, config.head_dim)
    for name, heads in sizes.items():
        full, shape = f"model.layers.0.self_attn.{name}.weight", (heads * config.head_dim, config.hidden_size)
        stored = plain.take(full, shape).view(heads, config.head_dim, -1)
        expected = stored if name == "v_proj" else stored[:, order]
        part = Part(0, Span(heads // 2, heads).times(config.head_dim))
        assert torch.equal(source.take(full, shape, part=part), expected[heads // 2 :].flatten(0, 1))
        assert torch.equal(source.take(full, shape), expected.flatten(0, 1))
