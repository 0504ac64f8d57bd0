"""Draft heads (MTP) against transformers, whose decoder layer is the head's: a model of that layer alone.

What goes into the layer (the product of the two norms) is written out here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.run_model import MAX_TOKENS, load_target, make_attention
from helpers.tiny_mla import (
    write_tiny_deepseek_v3,
    write_tiny_deepseek_v32,
    write_tiny_glm4_moe_lite,
    write_tiny_glm5,
)
from helpers.tiny_models import write_folder, write_tiny_llama
from helpers.tiny_moe import write_tiny_glm4_moe
from safetensors.torch import load_file

from sglang.srt.configs.draft_choice import choose_drafter
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.configs.speculative_args import NEXTN
from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.nextn import NextnHead

WRITERS: dict[str, Callable[..., Path]] = {
    "deepseek-v3": write_tiny_deepseek_v3,
    "deepseek-v3.2": partial(write_tiny_deepseek_v32, num_nextn_predict_layers=1),
    "glm4-moe": write_tiny_glm4_moe,
    "glm-4.7-flash": write_tiny_glm4_moe_lite,
    "glm-5": write_tiny_glm5,
}
T, LAYER = 80, "model.layers.4."
FAMILIES = pytest.mark.parametrize("family", WRITERS)


def load_head(target: DecoderModel, folder: Path | None = None, load_format: str = "auto") -> NextnHead:
    choice = choose_drafter(NEXTN, None if folder is None else str(folder), target.config)
    assert choice.config is not None and choice.folder is not None
    dtype = target.norm.weight.dtype
    return NextnHead(choice.config, open_source(choice.folder, load_format, dtype, "cpu"), target)


def rewrite(folder: Path, to: Path, config: dict[str, Any], **tensors: torch.Tensor | None) -> Path:
    """Fields and tensors replaced; None: left out."""
    fields = json.loads((folder / "config.json").read_text()) | config
    stored = {**load_file(folder / "model.safetensors"), **tensors}
    return write_folder(to, fields, {name: t for name, t in stored.items() if t is not None})


def layer_alone(folder: Path, to: Path) -> Path:
    """The head's layer as a model with one layer, its norm as the last norm."""
    stored = load_file(folder / "model.safetensors")
    tensors = {n: t for n, t in stored.items() if not n.startswith("model.layers.")}
    tensors |= {n.replace(LAYER, "model.layers.0."): t for n, t in stored.items() if n.startswith(LAYER)}
    tensors["model.norm.weight"] = tensors.pop("model.layers.0.shared_head.norm.weight")
    for name in ("enorm", "hnorm", "eh_proj"):
        del tensors[f"model.layers.0.{name}.weight"]
    fields = json.loads((folder / "config.json").read_text())
    fields |= {"num_hidden_layers": 1, "num_nextn_predict_layers": 0, "first_k_dense_replace": 0}
    fields["mlp_layer_types"] = ["sparse"]
    if "indexer_types" in fields:
        fields["indexer_types"] = ["full"]
    return write_folder(to, fields, tensors)


def inputs(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Next ids [T], hidden states [T, 64], positions [T]."""
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (T,), generator=g)
    return ids, torch.randn(T, 64, generator=g).to(dtype) * 2, torch.arange(T)


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


@FAMILIES
def test_logits_of_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    folder = WRITERS[family](tmp_path / "target", seed=3)
    w = load_file(folder / "model.safetensors")
    ids, hidden, positions = inputs(0, torch.float32)
    embedded = norm(w["model.embed_tokens.weight"][ids], w[f"{LAYER}enorm.weight"])
    joined = torch.cat((embedded, norm(hidden, w[f"{LAYER}hnorm.weight"])), -1)
    theirs = AutoModelForCausalLM.from_pretrained(
        layer_alone(folder, tmp_path / "alone"), dtype=torch.float32
    )
    with torch.no_grad():
        expected = theirs(inputs_embeds=(joined @ w[f"{LAYER}eh_proj.weight"].T)[None]).logits[0]

    head = load_head(load_target(folder, torch.float32))
    attn = make_attention(head.kv_shape, 16, torch.float32).prefill(PrefillRows((1,), (0,), (T,)))
    got = head.logits(head.layer(ids, hidden, positions, attn, write=True))
    assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


@FAMILIES
def test_a_sync_writes_what_the_layer_writes(tmp_path: Path, family: str) -> None:
    """Also an indexer's keys; the first draft forward then reads them and writes nothing."""
    head = load_head(load_target(WRITERS[family](tmp_path), torch.float64))
    ids, hidden, positions = inputs(1, torch.float64)
    full, synced = (make_attention(head.kv_shape, 4, torch.float64) for _ in range(2))
    expected = head.layer(ids, hidden, positions, full.prefill(PrefillRows((2,), (0,), (T,))), write=True)
    places = synced.places(torch.full((T,), 2), positions)
    head.write(synced.pool, places, ids, hidden, positions)
    for ours, theirs in zip(synced.pool.tensors, full.pool.tensors, strict=True):
        torch.testing.assert_close(ours[:, places], theirs[:, places], rtol=1e-9, atol=1e-9)
    assert len(synced.pool.tensors) == (2 if family in ("glm-5", "deepseek-v3.2") else 1)
    before = [tensor.clone() for tensor in synced.pool.tensors]
    none = DecodeRows(torch.tensor([2]), torch.tensor([T]), T, 1, Block.NONE)
    a = head.layer(ids[-1:], hidden[-1:], positions[-1:], synced.decode(none), write=False)
    torch.testing.assert_close(a, expected[-1:], rtol=1e-9, atol=1e-9)
    for tensor, old in zip(synced.pool.tensors, before, strict=True):
        assert torch.equal(tensor.nan_to_num(7.0), old.nan_to_num(7.0))


def test_the_feature_is_the_normed_output_of_the_target(tmp_path: Path) -> None:
    target = load_target(write_tiny_deepseek_v3(tmp_path), torch.float64)
    head = load_head(target)
    assert head.aux_layers == (4,) and head.feature_size == 64
    attn = make_attention(target.kv_shape, 4, torch.float64).prefill(PrefillRows((1,), (0,), (T,)))
    ids, _, positions = inputs(2, torch.float64)
    hidden, aux = target.forward(ids, positions, attn, head.aux_layers)
    assert aux is not None and torch.equal(head.feature(aux), target.norm(hidden))
    assert torch.equal(head.logits(head.feature(aux)), target.logits(hidden))


def test_copies_of_the_target_s_ends_are_left_out(tmp_path: Path) -> None:
    folder = write_tiny_deepseek_v3(tmp_path / "a")
    copies = {f"{LAYER}embed_tokens.weight": torch.ones(256, 64)}
    copies[f"{LAYER}shared_head.head.weight"] = torch.ones(256, 64)
    target = load_target(rewrite(folder, tmp_path / "b", {}, **copies), torch.float32)
    head = load_head(target)
    assert head.embed is target.embed and head.lm_head is target.lm_head


def test_from_a_folder_of_its_own(tmp_path: Path) -> None:
    """The target's files need not hold the head, nor the head's the target."""
    folder = write_tiny_glm5(tmp_path / "whole")
    stored = load_file(folder / "model.safetensors")
    is_head = {name: name.startswith(LAYER) for name in stored}
    headless = rewrite(folder, tmp_path / "t", {}, **{n: None for n, own in is_head.items() if own})
    alone = rewrite(folder, tmp_path / "d", {}, **{n: None for n, own in is_head.items() if not own})
    target = load_target(headless, torch.float32)
    ids, hidden, positions = inputs(4, torch.float32)
    outputs = []
    for head in (load_head(target, alone), load_head(load_target(folder, torch.float32))):
        attn = make_attention(head.kv_shape, 4, torch.float32).prefill(PrefillRows((1,), (0,), (T,)))
        outputs.append(head.layer(ids, hidden.clone(), positions, attn, write=True))
    assert torch.equal(*outputs)
    with pytest.raises(WeightError, match="missing: .*model.layers.4.enorm.weight"):
        load_head(target)  # never zeros, and never a guess


def test_what_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_deepseek_v3(tmp_path / "a")
    target = load_target(folder, torch.float32)
    lost = f"{LAYER}mlp.experts.3.up_proj.weight"
    with pytest.raises(WeightError, match=f"missing: {lost}$"):
        load_head(target, rewrite(folder, tmp_path / "b", {}, **{lost: None}))
    extra = {f"{LAYER}self_attn.q_proj.weight": torch.zeros(1), "model.other": torch.zeros(1)}
    with pytest.raises(WeightError, match="unexpected: model.layers.4.self_attn.q_proj.weight$"):
        load_head(target, rewrite(folder, tmp_path / "c", {}, **extra))
    with pytest.raises(ModelConfigError, match="num_nextn_predict_layers to be 1, and it is 0: use --spec"):
        load_head(load_target(write_tiny_llama(tmp_path / "d"), torch.float32))
    with pytest.raises(ModelConfigError, match="number of layers 3, but the target's is 4"):
        load_head(target, write_tiny_deepseek_v3(tmp_path / "e", num_hidden_layers=3))
    with pytest.raises(ModelConfigError, match="architecture Glm4MoeLite.* but the target's is DeepseekV3"):
        load_head(target, write_tiny_glm4_moe_lite(tmp_path / "f"))


def test_dummy_weights(tmp_path: Path) -> None:
    target = load_target(write_tiny_glm4_moe(tmp_path), torch.float32, "dummy")
    head = load_head(target, load_format="dummy")
    assert head.config == choose_drafter(NEXTN, None, ModelConfig.from_folder(tmp_path)).config
    ids, hidden, positions = inputs(5, torch.float32)
    attn = make_attention(head.kv_shape, 4, torch.float32).prefill(PrefillRows((1,), (0,), (T,)))
    assert torch.isfinite(head.logits(head.layer(ids, hidden, positions, attn, write=True))).all()
    assert 0 < head.weight_bytes < MAX_TOKENS * 2**20
