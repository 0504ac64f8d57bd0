"""Weight sources: names in errors, broken files, dtypes, shards, dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.tiny_models import write_folder, write_tiny_llama
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.shares import Span
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import Part, WeightError, WeightSource
from sglang.srt.models.registry import build_model

A = torch.arange(6.0).view(2, 3)
B = torch.arange(4.0)


def source_of(folder: Path, dtype: torch.dtype = torch.float32, load_format: str = "auto") -> WeightSource:
    return open_source(folder, load_format, dtype, "cpu")


def build(folder: Path) -> None:
    config = ModelConfig.from_folder(folder)
    build_model(config, source_of(folder), torch.float32, "cpu", 600)


@pytest.mark.parametrize("num_shards", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_takes_tensors_in_the_wanted_dtype(tmp_path: Path, num_shards: int, dtype: torch.dtype) -> None:
    ids = torch.tensor([3, 1, 2])
    source = source_of(write_folder(tmp_path, {}, {"a": A, "b": B, "ids": ids}, num_shards), dtype)
    assert torch.equal(source.take("a", (2, 3)), A.to(dtype))
    assert source.take("b", (4,)).dtype == dtype
    assert torch.equal(source.take_integers("ids", 3), ids)
    assert source.has("a") and not source.has("c")
    source.finish()


def test_one_error_names_every_tensor(tmp_path: Path) -> None:
    source = source_of(write_folder(tmp_path, {}, {"a": A, "b": B, "extra.x": B, "rotary.inv_freq": B}))
    assert torch.equal(source.take("a", (3, 3)), torch.zeros(3, 3))
    source.take("b", (4,))
    assert torch.equal(source.take("absent.1", (2,)), torch.zeros(2))
    assert torch.equal(source.take_integers("absent.2", 2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(WeightError) as caught:
        source.finish(("*inv_freq",))
    message = str(caught.value)
    assert "missing: absent.1, absent.2" in message
    assert "unexpected: extra.x;" in message
    assert "of another shape: a [2, 3] instead of [3, 3]" in message
    assert str(tmp_path) in message and "inv_freq" not in message and "\n" not in message


def test_a_model_names_what_its_checkpoint_lacks(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    build(folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2)
    write_folder(folder, config, tensors)
    with pytest.raises(WeightError, match="missing: model.layers.1.mlp.up_proj.weight; unexpected: model.la"):
        build(folder)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    file = write_tiny_llama(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightError, match="model.safetensors is truncated or not a safetensors file"):
        source_of(tmp_path)
    file.write_bytes(b"")
    with pytest.raises(WeightError, match="model.safetensors is truncated"):
        source_of(tmp_path)


def test_files_that_an_index_names(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path, num_shards=3)
    build(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightError, match="lacks files .* names: model-00002-of-00003.safetensors"):
        source_of(folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(WeightError, match="index.json is not valid JSON"):
        source_of(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightError, match="lacks a 'weight_map'"):
        source_of(folder)


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="has no weights"):
        source_of(tmp_path)
    with pytest.raises(WeightError, match="has no weights .a .gguf file"):
        source_of(tmp_path, load_format="gguf")
    with pytest.raises(WeightError, match="load format 'npcache' is not one of"):
        source_of(tmp_path, load_format="npcache")


def test_pytorch_files(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": A}, file)
    source = source_of(tmp_path)
    assert torch.equal(source.take("a", (2, 3)), A)
    source.finish()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(WeightError, match="pytorch_model.bin is truncated or not a PyTorch weight file"):
        source_of(tmp_path)
    torch.save([A], file)
    with pytest.raises(WeightError, match="does not hold a dictionary of tensors"):
        source_of(tmp_path)


def test_dummy_weights(tmp_path: Path) -> None:
    first, second = (open_source(tmp_path, "dummy", torch.float32, "cpu") for _ in range(2))
    second.take("other.weight", (5, 5))
    drawn = first.take("x.weight", (64, 256))
    assert torch.equal(drawn, second.take("x.weight", (64, 256)))
    assert not torch.equal(drawn, first.take("y.weight", (64, 256)))
    assert 0.9 < drawn.std().item() * 256**0.5 < 1.1
    assert torch.equal(first.take("norm.weight", (3,)), torch.ones(3))
    assert torch.equal(first.take_integers("d2t", 3), torch.zeros(3, dtype=torch.int64))
    first.finish()


def test_a_model_of_dummy_weights_is_finite(tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path)
    (folder / "model.safetensors").unlink()
    config = ModelConfig.from_folder(folder)
    model = build_model(config, source_of(folder, load_format="dummy"), torch.float32, "cpu", 600)
    logits = model.logits(model.embed(torch.arange(4)))
    assert torch.isfinite(logits).all() and logits.std() > 0.1


@pytest.mark.parametrize("load_format", ["safetensors", "pt", "dummy"])
@pytest.mark.parametrize("dim, begin, end", [(0, 1, 3), (1, 0, 2), (1, 2, 2), (2, 3, 4), (0, 0, 4)])
def test_a_part_is_that_of_the_whole(
    tmp_path: Path, load_format: str, dim: int, begin: int, end: int
) -> None:
    whole = torch.randn(4, 3, 4)
    if load_format == "pt":
        torch.save({"a": whole}, tmp_path / "pytorch_model.bin")
    else:
        write_folder(tmp_path, {}, {"a": whole})
    if load_format == "dummy":
        whole = source_of(tmp_path, load_format="dummy").take("a", (4, 3, 4))
    source = source_of(tmp_path, load_format=load_format)
    part = Part(dim, Span(begin, end))
    taken = source.take("a", (4, 3, 4), part=part)
    assert torch.equal(taken, whole.narrow(dim, begin, end - begin)) and taken.is_contiguous()
    assert source.take("b", (4, 3, 4), part=part).shape == part.shape((4, 3, 4))
