"""GPT-OSS's experts in MXFP4: what transformers dequantises is what is loaded, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.run_model import Driver, load_target
from helpers.tiny_models import Tensors, write_folder
from helpers.tiny_moe import gpt_oss_config, gpt_oss_tensors

from sglang.srt.layers.moe.layer import MoE
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.models.dense import DenseLayer

FIELDS = gpt_oss_config() | {"num_hidden_layers": 2}
QUANTISED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def packed(seed: int = 0) -> tuple[Tensors, Tensors]:
    """Tensors of an MXFP4 checkpoint, and of the same model as transformers dequantises it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(seed)
    stored, plain = gpt_oss_tensors(FIELDS, 1), gpt_oss_tensors(FIELDS, 1)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, in_features, out = stored.pop(name).shape
        groups = (experts, out, in_features // 32)
        blocks = torch.randint(0, 256, (*groups, 16), generator=g, dtype=torch.uint8)
        low = 118 if name.endswith("down_proj") else 123  # what a layer adds stays small
        scales = torch.randint(low, low + 3, groups, generator=g, dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return stored, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mxfp4_is_what_it_stands_for(tmp_path: Path, dtype: torch.dtype) -> None:
    stored, plain = packed()
    quantised = load_target(write_folder(tmp_path / "q", FIELDS | QUANTISED, stored), dtype)
    other = load_target(write_folder(tmp_path / "p", FIELDS, plain), dtype)
    for layer, expected in zip(quantised.layers, other.layers, strict=True):
        assert isinstance(layer, DenseLayer) and isinstance(expected, DenseLayer)
        assert isinstance(layer.mlp, MoE) and isinstance(expected.mlp, MoE)
        assert torch.equal(layer.mlp.experts.gate_up, expected.mlp.experts.gate_up)
        assert torch.equal(layer.mlp.experts.down, expected.mlp.experts.down)
    ids = torch.arange(40)
    logits = [Driver(model, 16, dtype).prefill(ids) for model in (quantised, other)]
    assert torch.isfinite(logits[0]).all() and torch.equal(logits[0], logits[1])


def test_lacking_scales_are_named(tmp_path: Path) -> None:
    stored, _ = packed()
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(WeightError, match="missing: model.layers.1.mlp.experts.down_proj_scales"):
        load_target(write_folder(tmp_path, FIELDS | QUANTISED, stored), torch.float32)
