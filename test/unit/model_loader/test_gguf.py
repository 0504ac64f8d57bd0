"""GGUF files: written here by the package gguf, with llama.cpp's order of rows, and read as models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from helpers.run_model import Driver, load_target
from helpers.tiny_models import write_folder, write_tiny_llama, write_tiny_qwen2, write_tiny_qwen3
from safetensors.torch import load_file

from sglang.srt.model_loader.weight_source import WeightError

Q8 = gguf.GGMLQuantizationType.Q8_0


def write_gguf(source: Path, folder: Path, architecture: str, rows_of_pairs: bool) -> tuple[Path, Path]:
    """Matrices of layers in Q8_0 and the rest in float32: the folder, and one of what that stands for."""
    config = json.loads((source / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(folder / "model.gguf", architecture)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), 99)
    plain = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        values, plain[name] = tensor.numpy(), tensor
        its_heads = heads if "q_proj" in name else kv_heads if "k_proj" in name else 0
        is_paired = rows_of_pairs and its_heads > 0
        if is_paired:
            values = paired(values, its_heads)
        stored = names.get_name(name, (".weight", ".bias"))
        if not name.endswith("_proj.weight"):
            writer.add_tensor(stored, values)
            continue
        packed = gguf.quants.quantize(values, Q8)
        writer.add_tensor(stored, packed, raw_dtype=Q8)
        stands_for = gguf.quants.dequantize(packed, Q8)
        plain[name] = torch.from_numpy((unpaired(stands_for, its_heads) if is_paired else stands_for).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    shutil.copy(source / "config.json", folder)
    return folder, write_folder(folder / "plain", config, plain)


def paired(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row ``half * d / 2 + i`` of a head goes to row ``2 * i + half``, as llama.cpp's converter does."""
    head_dim = rows.shape[0] // heads
    order = [half * (head_dim // 2) + i for i in range(head_dim // 2) for half in range(2)]
    return np.concatenate([head[order] for head in np.split(rows, heads)])


def unpaired(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    order = paired(np.arange(rows.shape[0]), heads)
    return rows[np.argsort(order)]


@pytest.mark.parametrize(
    "writer, architecture, fields",
    [
        (write_tiny_llama, "llama", {}),
        (write_tiny_llama, "llama", {"attention_bias": True, "tie_word_embeddings": True}),
        (write_tiny_qwen2, "qwen2", {}),
        (write_tiny_qwen3, "qwen3", {}),
    ],
)
@pytest.mark.parametrize("load_format", ["auto", "gguf"])
def test_models_of_gguf_files(
    tmp_path: Path, writer: Callable[..., Path], architecture: str, fields: dict[str, Any], load_format: str
) -> None:
    source = writer(tmp_path / "source", num_hidden_layers=2, **fields)
    folder, plain = write_gguf(source, tmp_path, architecture, rows_of_pairs=architecture == "llama")
    ids = torch.arange(40) * 7 % 256
    runs = [
        Driver(load_target(path, torch.float32, form), 16, torch.float32).prefill(ids)
        for path, form in ((folder, load_format), (plain, "auto"))
    ]
    assert torch.equal(*runs)


def test_files_that_can_not_be_used(tmp_path: Path) -> None:
    source = write_tiny_llama(tmp_path / "source", num_hidden_layers=1)
    folder, _ = write_gguf(source, tmp_path, "llama", rows_of_pairs=True)
    file = folder / "model.gguf"
    whole = file.read_bytes()
    (folder / "second.gguf").write_bytes(whole)
    with pytest.raises(WeightError, match="several GGUF files .model.gguf, second.gguf"):
        load_target(folder, torch.float32, "gguf")
    (folder / "second.gguf").unlink()
    file.write_bytes(whole.replace(b"blk.0.attn_v.weight", b"blk.0.attn_x.weight"))
    with pytest.raises(WeightError, match=r"missing: model.*v_proj.weight; unexpected: blk.0.attn_x.weight"):
        load_target(folder, torch.float32, "gguf")
    file.write_bytes(whole.replace(b"llama", b"gemma"))
    with pytest.raises(WeightError, match="architecture 'gemma' are not supported .supported: llama"):
        load_target(folder, torch.float32, "gguf")
    for size in (3, 100, len(whole) - 5000):
        file.write_bytes(whole[:size])
        with pytest.raises(WeightError, match="model.gguf is truncated or not a GGUF file"):
            load_target(folder, torch.float32, "gguf")
