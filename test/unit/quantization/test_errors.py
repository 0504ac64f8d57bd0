"""Files that contradict their config, or lack something: one error that names the module."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.quantise import FORMATS, write_quantised
from helpers.run_model import load_target
from helpers.tiny_models import Tensors, write_folder, write_tiny_llama
from safetensors.torch import load_file

from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.managers.executor_build_models import load_models
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import WeightError

Q = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.1.mlp.down_proj"
CPU = torch.device("cpu")
Change = Callable[[Tensors, dict[str, Any]], object]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            source = write_tiny_llama(root / "source", num_hidden_layers=2)
            made[name] = write_quantised(source, root, FORMATS[name])[0]
        return made[name]

    return folder


def drop(name: str) -> Change:
    return lambda tensors, config: tensors.pop(name)


def put(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    return lambda tensors, config: tensors.update({name: change(tensors[name])})


def add(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors, config: tensors.update({name: tensor})


def say(**fields: Any) -> Change:
    return lambda tensors, config: config["quantization_config"].update(fields)


def say_weights(**fields: Any) -> Change:
    def change(tensors: Tensors, config: dict[str, Any]) -> None:
        config["quantization_config"]["config_groups"]["group_0"]["weights"].update(fields)

    return change


FLOATS = say_weights(num_bits=8, type="float", strategy="channel")
PROBLEMS = [
    ("int4", drop(f"{Q}.weight_scale"), f"missing: {Q}.weight_scale"),
    (
        "int4",
        drop(f"{Q}.weight_packed"),
        f"missing: {Q}.weight; unexpected: {Q}.weight_scale, ",
    ),
    ("int4", drop(f"{Q}.weight_shape"), f"missing: {Q}.weight_shape"),
    ("int4", add(f"{Q}.weight_zero_point", torch.zeros(8, 2)), f"unexpected: {Q}.weight_zero_point"),
    (
        "int4",
        put(f"{Q}.weight_shape", lambda t: t + 1),
        r"weight_shape says \[65, 65\], not \[64, 64\]",
    ),
    ("int4", say_weights(group_size=16), r"q_proj.weight_scale \[64, 2\] instead of \[64, 4\]"),
    ("int4", say_weights(group_size=48), "q_proj has 64 columns, no multiple of the groups of 48"),
    ("int4", say_weights(num_bits=8), r"q_proj.weight_packed \[64, 8\] instead of \[64, 16\]"),
    ("int4", say_weights(symmetric=False), f"missing: .*{Q}.weight_zero_point"),
    ("int4", say(ignore=["re:.*self_attn.*"]), f"{Q} is packed, although .* lists it"),
    ("int4", say(ignore=[DOWN]), f"{DOWN} is packed, although"),
    (
        "int4",
        say_weights(num_bits=8, type="float", strategy="channel"),
        f"{Q} holds int weights, of which .* says nothing",
    ),
    ("int4", put(f"{Q}.weight_scale", lambda t: t.int()), r"q_proj.weight_scale is torch.int32, not"),
    ("int8", drop(f"{Q}.weight_scale"), f"missing: {Q}.weight_scale"),
    ("gptq", drop(f"{Q}.qzeros"), f"missing: {Q}.qzeros"),
    ("gptq", put(f"{Q}.g_idx", lambda t: t + 9), "q_proj.g_idx names groups outside the 2"),
    ("gptq", put(f"{Q}.bias", lambda t: t + 1), f"{Q}.bias is not zero, but the model has none"),
    ("awq", drop(f"{Q}.qzeros"), "q_proj.qzeros is missing, although"),
    ("awq", drop(f"{DOWN}.scales"), f"missing: {DOWN}.scales"),
    ("fp8", drop(f"{Q}.weight_scale"), f"missing: {Q}.weight_scale"),
    ("fp8-block", say(weight_block_size=[16, 16]), r"weight_scale_inv \[2, 2\] instead of \[4, 4\]"),
    ("fp8-block", say(modules_to_not_convert=["model.layers.0.self_attn"]), f"{Q} is packed, although"),
    ("fp8-block", add(f"{Q}.weight_scale_3", torch.ones(1)), f"unexpected: {Q}.weight_scale_3"),
    ("nvfp4", drop(f"{DOWN}.weight_scale_2"), f"missing: {DOWN}.weight_scale_2"),
    (
        "nvfp4",
        put(f"{DOWN}.weight_scale", lambda t: t.float()),
        "weight_scale is torch.float32, not",
    ),
    ("nvfp4", say(ignore=["*down_proj"]), f"{DOWN} is packed, although"),
    ("ct-nvfp4", drop(f"{Q}.weight_global_scale"), f"missing: {Q}.weight_global_scale"),
]


@pytest.mark.parametrize("name, change, message", PROBLEMS, ids=lambda v: v if isinstance(v, str) else "")
def test_what_does_not_fit(
    tmp_path: Path,
    folders: Callable[[str], Path],
    name: str,
    change: Change,
    message: str,
) -> None:
    tensors = load_file(folders(name) / "model.safetensors")
    config = json.loads((folders(name) / "config.json").read_text())
    change(tensors, config)
    folder = write_folder(tmp_path, config, tensors)
    with pytest.raises(WeightError, match=message) as caught:
        load_target(folder, torch.float32)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, flag",
    [("int4", "compressed-tensors"), ("awq", "awq_marlin"), ("nvfp4", "modelopt_fp4"), ("fbgemm", "fp8")],
)
def test_a_flag_that_agrees(folders: Callable[[str], Path], name: str, flag: str) -> None:
    load_models(ExecutorArgs(str(folders(name)), quantization=flag), CPU)


@pytest.mark.parametrize(
    "name, flag, message",
    [
        ("int4", "awq", "says compressed-tensors; leave it out"),
        ("nvfp4", "modelopt_fp8", "says modelopt with float4 weights"),
        ("", "fp8", "are not quantised, and nothing is quantised while loading"),
    ],
)
def test_a_flag_that_contradicts(
    tmp_path: Path, folders: Callable[[str], Path], name: str, flag: str, message: str
) -> None:
    folder = folders(name) if name else write_tiny_llama(tmp_path)
    with pytest.raises(ModelConfigError, match=f"--quantization {flag}: .*{message}"):
        load_models(ExecutorArgs(str(folder), quantization=flag), CPU)


def test_a_packed_form_is_to_be_had(folders: Callable[[str], Path]) -> None:
    """Until ``finish``, in parts of the size in the file; a plain tensor has none."""
    folder = folders("int4")
    quant = ModelConfig.from_folder(folder).quant
    assert quant is not None
    source: Any = open_source(folder, "auto", torch.float32, "cpu", quant)
    packed = source.take_packed(f"{Q}.weight", (64, 64))
    assert packed.packed_bytes == 64 * 64 // 2 + 64 * 2 * 2
    assert source.has(f"{DOWN}.weight") and not source.has(f"{DOWN}.bias")
    assert source.take_packed("lm_head.weight", (256, 64)) is None
    fresh: Any = open_source(folder, "auto", torch.float32, "cpu", quant)
    assert torch.equal(fresh.take(f"{Q}.weight", (64, 64)), packed.dequantise(torch.float32))
