"""Dummy weights of a quantised model: packed in the config's format, then what a real one goes through."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.quantise import FORMATS
from helpers.run_model import Driver, load_target
from helpers.tiny_models import write_tiny_llama

from sglang.srt.configs.quant_config import QuantConfig, read_quant
from sglang.srt.distributed.shares import Span
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import Part, WeightError, WeightSource

Q = "model.layers.0.mlp.down_proj.weight"
SHAPE = (64, 384)
DESCRIBED = {
    "int4": "int4 in groups of 32", "int4-zeros": "int4 in groups of 32 with zero points",
    "int4-rows": "int4 in groups of 384", "int8-packed": "int8 in groups of 64 with zero points",
    "gptq": "int4 in groups of 32", "gptq-8": "int8 in groups of 32",
    "awq": "int4 in groups of 32 with zero points", "fp8-block": "fp8 in blocks of 32 x 48",
    "fp8": "fp8 with one scale", "nvfp4": "nvfp4", "ct-nvfp4": "nvfp4", "ct-mxfp4": "mxfp4",
}  # fmt: skip


def quant_of(folder: Path, name: str) -> QuantConfig:
    (folder / "config.json").write_text(json.dumps({"quantization_config": FORMATS[name].config}))
    quant = read_quant(folder)
    assert quant is not None
    return quant


def drawn(source: WeightSource, name: str = Q, part: Part | None = None) -> QuantWeight:
    packed = source.take_packed(name, SHAPE, part)
    assert packed is not None
    return packed


@pytest.mark.parametrize("name", DESCRIBED)
def test_packed_in_the_format_of_the_config(tmp_path: Path, name: str) -> None:
    quant = quant_of(tmp_path, name)
    source, again = (open_source(tmp_path, "dummy", torch.float32, "cpu", quant) for _ in range(2))
    packed = drawn(source)
    assert packed.describe().startswith(DESCRIBED[name]) and packed.shape == SHAPE
    matrix = packed.dequantise(torch.float32)
    assert torch.equal(matrix, again.take(Q, SHAPE))
    assert not torch.equal(matrix, again.take(Q.replace("0", "1"), SHAPE))
    assert matrix.unique().numel() > 10
    assert (
        0.6 < matrix.std().item() * SHAPE[1] ** 0.5 < 1.5 and abs(matrix.mean().item()) < 0.3 * matrix.std()
    )
    if isinstance(packed, Fp4Weight) and packed.describe() == "nvfp4":
        assert packed.activation_scale is not None and float(packed.activation_scale) == pytest.approx(
            8 / 2688
        )
    for part in (Part(0, Span(32, 64)), Part(1, Span(192, 384))):
        assert torch.equal(drawn(source, part=part).dequantise(torch.float32), part.of(matrix))
    source.finish()


def test_what_is_never_packed(tmp_path: Path) -> None:
    quant = quant_of(tmp_path, "nvfp4")  # its config leaves out attention and lm_head
    source = open_source(tmp_path, "dummy", torch.bfloat16, "cpu", quant)
    names = ("model.embed_tokens", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.gate", "lm_head")
    for name in names:
        assert source.take_packed(f"{name}.weight", SHAPE) is None
        assert source.take(f"{name}.weight", SHAPE).unique().numel() > 1000
    assert torch.equal(source.take("model.norm.weight", (64,)), torch.ones(64, dtype=torch.bfloat16))
    assert not source.has(Q)
    source.finish()


def test_sizes_that_the_format_does_not_fit(tmp_path: Path) -> None:
    source = open_source(tmp_path, "dummy", torch.float32, "cpu", quant_of(tmp_path, "int4"))
    assert torch.equal(source.take(Q, (8, 40)), torch.zeros(8, 40))
    with pytest.raises(WeightError, match="down_proj has 40 columns, no multiple of the groups of 32"):
        source.finish()


def test_a_model_of_them(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": FORMATS["int4"].config}))
    driver = Driver(load_target(folder, torch.float32, "dummy"), 16, torch.float32)
    logits = driver.prefill(torch.arange(9))
    assert torch.isfinite(logits).all() and logits.std() > 0.1


def test_experts_in_blocks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    source = open_source(tmp_path, "dummy", torch.float32, "cpu", read_quant(tmp_path))
    name, shape = "model.layers.0.mlp.experts.down_proj", (3, 64, 8)
    matrices = source.take(name, shape)
    assert matrices.shape == shape and matrices.unique().numel() == 15
    part = Part(1, Span(32, 64))
    assert torch.equal(source.take(name, shape, part=part), part.of(matrices))
    source.finish()
