"""Quantised checkpoints equal the unquantised ones they stand for, bit for bit.

Run alone: ``pytest test/unit/quantization``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.quantise import FORMATS, write_quantised
from helpers.run_model import Driver, load_target
from helpers.tiny_models import write_tiny_llama, write_tiny_qwen2, write_tiny_qwen3
from helpers.tiny_moe import write_tiny_qwen3_moe
from safetensors.torch import load_file

from sglang.srt.configs.quant_config import read_quant

WRITERS = (write_tiny_llama, write_tiny_qwen2, write_tiny_qwen3)


@pytest.mark.parametrize("name", FORMATS)
def test_model_equals_the_dequantised_one(tmp_path: Path, name: str) -> None:
    """Prefill, a chunk, decode and several queries a row; families take turns."""
    writer = WRITERS[list(FORMATS).index(name) % len(WRITERS)]
    source = writer(tmp_path / "source", seed=3, num_hidden_layers=2)
    quantised, plain = write_quantised(source, tmp_path, FORMATS[name])
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.float64):
        logits = []
        for folder in (quantised, plain):
            driver = Driver(load_target(folder, dtype), 16, dtype)
            parts = [driver.prefill(ids[:20]), driver.prefill(ids[20:33])]
            parts += [driver.decode(ids[33:34]), driver.decode(ids[34:40])]
            logits.append(torch.cat(parts))
        assert torch.equal(*logits)
    assert not torch.equal(logits[0], Driver(load_target(source, dtype), 16, dtype).prefill(ids))


def test_compressed_tensors_model_equals_transformers(tmp_path: Path) -> None:
    """Which reads it with the package that the format is from."""
    from transformers import AutoModelForCausalLM

    source = write_tiny_llama(tmp_path / "source", seed=1, num_hidden_layers=2)
    quantised, _ = write_quantised(source, tmp_path, FORMATS["int4-zeros"])
    ids = torch.randint(0, 256, (60,), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32)(ids[None]).logits[0]
    got = Driver(load_target(quantised, torch.float32), 16, torch.float32).prefill(ids)
    assert float((got - expected).abs().max() / expected.abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["int4", "nvfp4", "fp8-block"])
def test_experts_are_quantised_one_by_one(tmp_path: Path, name: str) -> None:
    """Routed experts alone, as in Kimi's files; router and attention stay as they are."""
    form = replace(FORMATS[name], dense=("lm_head", "self_attn", "layers.0.mlp"))
    source = write_tiny_qwen3_moe(tmp_path / "source", seed=5)
    quantised, plain = write_quantised(source, tmp_path, form)
    packed = [n for n in load_file(quantised / "model.safetensors") if "weight_scale" in n]
    assert packed and all(".mlp.experts." in n for n in packed)
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    runs = [Driver(load_target(f, torch.float32), 16, torch.float32).prefill(ids) for f in (quantised, plain)]
    assert torch.equal(*runs)


@pytest.mark.parametrize("text_only", [True, False])
def test_a_nested_config_says_it_too(tmp_path: Path, text_only: bool) -> None:
    """Kimi-K2.5 has it in the text part, served copies at both levels."""
    said = {"quantization_config": FORMATS["int4"].config}
    config = {"text_config": said} | ({} if text_only else said)
    (tmp_path / "config.json").write_text(json.dumps(config))
    quant = read_quant(tmp_path)
    assert quant is not None and quant.schemes[0].group_size == 32
