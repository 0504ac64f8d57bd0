"""GPT-OSS's experts in MXFP4: what transformers dequantises is what is loaded, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.run_model import Driver, load_target
from helpers.tiny_models import Tensors, write_folder
from helpers.tiny_moe import gpt_oss_config, gpt_oss_tensors

from sgl_kernel.moe.weights import MXFP4_LARGEST, Format
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.layers.moe.kernel_experts import KernelExperts
from sglang.srt.layers.moe.layer import MoE
from sglang.srt.layers.norm import RMSNorm
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.models import packed as packed_models
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.dense import DenseLayer
from sglang.srt.models.gpt_oss import GptOssForCausalLM

FIELDS = gpt_oss_config() | {"num_hidden_layers": 2}
QUANTISED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def packed(seed: int = 0, fields: dict[str, Any] = FIELDS) -> tuple[Tensors, Tensors]:
    """Tensors of an MXFP4 checkpoint, and of the same model as transformers dequantises it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    g = torch.Generator().manual_seed(seed)
    stored, plain = gpt_oss_tensors(fields, 1), gpt_oss_tensors(fields, 1)
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


@contextmanager
def kernels() -> Iterator[None]:
    with mock.patch.object(packed_models, "wants_kernels", lambda device: True):
        yield


def logits_of(folder: Path, dtype: torch.dtype = torch.float32) -> tuple[DecoderModel, torch.Tensor]:
    model = load_target(folder, dtype)
    driver, ids = Driver(model, 16, dtype), torch.arange(40)
    return model, torch.cat([driver.prefill(ids[:36]), driver.decode(ids[36:])])


def experts_of(mlp: object) -> KernelExperts:
    assert isinstance(mlp, MoE) and isinstance(mlp.experts, KernelExperts)
    return mlp.experts


def test_kernels_keep_it_packed_where_they_hold_its_scales(tmp_path: Path) -> None:
    """In layer 1 one scale of down is larger than 2: that matrix is dequantised."""
    stored, _ = packed()
    scales = stored["model.layers.1.mlp.experts.down_proj_scales"]
    scales[3, 5, 0] = MXFP4_LARGEST + 1
    folder = write_folder(tmp_path, FIELDS | QUANTISED, stored)
    _, expected = logits_of(folder)
    with kernels():
        model, got = logits_of(folder)
    held = [experts_of(layer.mlp) for layer in model.layers if isinstance(layer, DenseLayer)]
    forms = [(experts.gate_up.format, experts.down.format) for experts in held]
    assert forms == [(Format.MXFP4, Format.MXFP4), (Format.MXFP4, Format.PLAIN)]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_ranks_have_their_parts(tmp_path: Path) -> None:
    """Over two ranks, of 3 groups: what they add up to is the whole, biases once."""
    fields = FIELDS | {"intermediate_size": 96, "num_hidden_layers": 1}
    stored, _ = packed(fields=fields)
    folder = write_folder(tmp_path, fields | QUANTISED, stored)
    config = ModelConfig.from_folder(folder)
    assert config.quant is not None
    x = torch.randn(5, fields["hidden_size"], generator=torch.Generator().manual_seed(1))
    norm = RMSNorm(torch.ones(fields["hidden_size"]), 1e-5)
    parts = []
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        source = open_source(folder, "auto", torch.float32, "cpu", config.quant)
        own = GptOssForCausalLM.__new__(GptOssForCausalLM)
        own.tp = TensorParallel(rank, size).in_units(config.quant.columns_unit)
        with kernels():
            mlp = own.make_mlp(config, source, 0)
        assert isinstance(mlp, MoE)
        weights, experts = mlp.router(norm(x))
        parts.append(mlp.experts(norm(x), weights, experts))
        assert experts_of(mlp).down.columns == {(0, 1): 96, (0, 2): 32, (1, 2): 64}[rank, size]
    torch.testing.assert_close(parts[1] + parts[2], parts[0], rtol=1e-5, atol=1e-5)


def test_lacking_scales_are_named(tmp_path: Path) -> None:
    stored, _ = packed()
    del stored["model.layers.1.mlp.experts.down_proj_scales"]
    with pytest.raises(WeightError, match="missing: model.layers.1.mlp.experts.down_proj_scales"):
        load_target(write_folder(tmp_path, FIELDS | QUANTISED, stored), torch.float32)


@pytest.mark.parametrize("by_kernels", [False, True])
def test_dummy_weights_are_packed_likewise(tmp_path: Path, by_kernels: bool) -> None:
    stored, _ = packed()
    folder = write_folder(tmp_path, FIELDS | QUANTISED, stored)
    with kernels() if by_kernels else nullcontext():
        model = load_target(folder, torch.float32, "dummy")
    assert isinstance(model.layers[1], DenseLayer)
    if by_kernels:
        assert experts_of(model.layers[1].mlp).down.format is Format.MXFP4
    logits = Driver(model, 16, torch.float32).prefill(torch.arange(40))
    assert torch.isfinite(logits).all() and logits.std() > 0.1
