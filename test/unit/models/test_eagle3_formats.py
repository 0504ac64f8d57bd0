"""EAGLE-3 checkpoints as different trainers write them, against their formulas written out in float64.

SafeAILab's and SpecForge's layout is the subject of ``test_llama_eagle3.py``; here are vLLM's speculators and
drafters with latent attention, whose attention is compared with transformers'.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention_reference import attend_one
from helpers.run_model import MAX_TOKENS, load_target, make_attention
from helpers.tiny_drafters import write_tiny_eagle3_mla, write_tiny_speculators
from helpers.tiny_mla import write_tiny_kimi_k25
from helpers.tiny_models import write_folder, write_tiny_eagle3, write_tiny_llama
from safetensors.torch import load_file

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError
from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows
from sglang.srt.layers.attention.mla_native import TorchNativeMLA
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.eagle3 import Eagle3Model
from sglang.srt.models.mla_eagle3 import MLAEagle3
from sglang.srt.models.registry import build_drafter

HIDDEN, NQ, NKV, D = 64, 8, 4, 16
T = 90  # beyond yarn's original 64 positions
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_target(write_tiny_llama(tmp_path_factory.mktemp("llama")), torch.float64)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_target(write_tiny_kimi_k25(tmp_path_factory.mktemp("kimi")), torch.float64)


def load(folder: Path, target: DecoderModel) -> Eagle3Model:
    config = ModelConfig.from_draft_folder(folder, 300)
    source = open_source(folder, "auto", torch.float64, "cpu", config.quant)
    return build_drafter(config, source, target, torch.float64, "cpu", MAX_TOKENS)


def tensors_of(folder: Path) -> Tensors:
    return {name: t.double() for name, t in load_file(folder / "model.safetensors").items()}


def inputs(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 256, (T,), generator=g)
    return ids, torch.randn(T, HIDDEN, generator=g, dtype=torch.float64), torch.arange(T)


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Pairs (i, i + d/2) as complex numbers, theta 10000. x: [T, heads, d], at positions 0, 1, …"""
    pairs = torch.complex(x[..., : D // 2].contiguous(), x[..., D // 2 :].contiguous())
    turn = torch.arange(T).double()[:, None] * 10000.0 ** (-torch.arange(D // 2).double() * 2 / D)
    turned = pairs * torch.polar(torch.ones_like(turn), turn)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def mlp(a: torch.Tensor, w: Tensors, prefix: str, eps: float) -> torch.Tensor:
    y = norm(a, w[f"{prefix}post_attention_layernorm.weight"], eps)
    gate = y @ w[f"{prefix}mlp.gate_proj.weight"].T
    up = y @ w[f"{prefix}mlp.up_proj.weight"].T
    return a + (gate * gate.sigmoid() * up) @ w[f"{prefix}mlp.down_proj.weight"].T


def run_layer(drafter: Eagle3Model, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """a [T, H] of a causal pass; what a sync writes is checked to be what the layer wrote."""
    positions, full, synced = (
        torch.arange(T),
        *(make_attention(drafter.kv_shape, 4, torch.float64) for _ in range(2)),
    )
    rows = full.prefill(PrefillRows((1,), (0,), (T,)))
    a = drafter.layer(ids, hidden.clone(), positions, rows, write=True)
    places = synced.places(torch.ones(T, dtype=torch.int64), positions)
    drafter.write(synced.pool, places, ids, hidden, positions)
    for ours, theirs in zip(synced.pool.tensors, full.pool.tensors, strict=True):
        torch.testing.assert_close(ours[:, places], theirs[:, places], rtol=1e-9, atol=1e-9)
    none = DecodeRows(torch.tensor([1]), torch.tensor([T]), T, 1, Block.NONE)
    last = drafter.layer(ids[-1:], hidden[-1:].clone(), positions[-1:], synced.decode(none), write=False)
    torch.testing.assert_close(last, a[-1:], rtol=1e-9, atol=1e-9)
    return a


@pytest.mark.parametrize("qwen3", [False, True])
def test_speculators(tmp_path: Path, llama: DecoderModel, qwen3: bool) -> None:
    """The residual is the normed hidden state, ids name inputs, and fields left out are transformers'."""
    folder = write_tiny_speculators(tmp_path, llama.config.path, qwen3=qwen3)
    drafter = load(folder, llama)
    assert drafter.aux_layers == (1, 2, 4)
    ids, hidden, _ = inputs()
    w, eps, p = tensors_of(folder), 1e-6, "layers.0."
    normed = norm(hidden, w[f"{p}hidden_norm.weight"], eps)
    x = torch.cat((norm(llama.embed.weight[ids], w[f"{p}input_layernorm.weight"], eps), normed), -1)
    q, k, v = (
        (x @ w[f"{p}self_attn.{name}_proj.weight"].T).view(T, heads, D)
        for name, heads in (("q", NQ), ("k", NKV), ("v", NKV))
    )
    if qwen3:
        q = norm(q, w[f"{p}self_attn.q_norm.weight"], eps)
        k = norm(k, w[f"{p}self_attn.k_norm.weight"], eps)
    q, k = rotate(q), rotate(k)
    heads = torch.stack([attend_one(q[t], k, v, torch.arange(T) <= t) for t in range(T)])
    expected = mlp(normed + heads.flatten(1) @ w[f"{p}self_attn.o_proj.weight"].T, w, p, eps)
    torch.testing.assert_close(run_layer(drafter, ids, hidden), expected, rtol=1e-9, atol=1e-9)
    logits = norm(expected, w["norm.weight"], eps) @ w["lm_head.weight"].T
    torch.testing.assert_close(drafter.logits(expected), logits, rtol=1e-9, atol=1e-9)


def test_speculators_defaults_are_those_of_transformers() -> None:
    from transformers import AutoConfig

    from sglang.srt.configs.draft_config import _LAYER_DEFAULTS

    for kind, defaults in _LAYER_DEFAULTS.items():
        theirs = AutoConfig.for_model(kind)
        assert {name: getattr(theirs, name) for name in defaults} == dict(defaults)


def test_an_embedding_that_was_trained(tmp_path: Path, llama: DecoderModel) -> None:
    folder = write_tiny_speculators(tmp_path, llama.config.path, embed_requires_grad=True)
    stored = load_file(folder / "model.safetensors")
    stored["embed_tokens.weight"] = torch.randn(256, HIDDEN)
    write_folder(folder, json.loads((folder / "config.json").read_text()), stored)
    drafter = load(folder, llama)
    assert torch.equal(drafter.embed.weight, stored["embed_tokens.weight"].double())
    assert drafter.weight_bytes > stored["embed_tokens.weight"].numel() * 8


def their_attention(folder: Path, w: Tensors, p: str, x: torch.Tensor) -> torch.Tensor:
    """transformers' attention of DeepSeek-V3 over pairs. x: [T, 2 * H] -> [T, heads * v]."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

    fields = json.loads((folder / "config.json").read_text())
    fields |= {"model_type": "deepseek_v3", "hidden_size": 2 * HIDDEN, "_attn_implementation": "eager"}
    config = DeepseekV3Config.from_dict(fields)
    attention = theirs.DeepseekV3Attention(config, 0).double()
    attention.q_a_layernorm.variance_epsilon = attention.kv_a_layernorm.variance_epsilon = 1e-5
    own = {n.removeprefix(f"{p}self_attn."): t for n, t in w.items() if n.startswith(f"{p}self_attn.")}
    width = own.pop("o_proj.weight").shape[1]
    attention.load_state_dict(own | {"o_proj.weight": torch.zeros(2 * HIDDEN, width)})
    attention.o_proj = torch.nn.Identity()
    angles = theirs.DeepseekV3RotaryEmbedding(config)(x[None], torch.arange(T)[None])
    mask = torch.full((T, T), float("-inf"), dtype=torch.float64).triu(1)[None, None]
    with torch.no_grad():
        out: torch.Tensor = attention(x[None], position_embeddings=angles, attention_mask=mask)[0]
    return out[0]


@pytest.mark.parametrize("layer_prefix", ["midlayer.", "layers.0."])
def test_latent_attention(tmp_path: Path, kimi: DecoderModel, layer_prefix: str) -> None:
    """lightseek's layout and NVIDIA's; Eagle 3.1's norms before ``fc`` and of the output."""
    folder = write_tiny_eagle3_mla(
        tmp_path, kimi.config.path, layer_prefix=layer_prefix, fc_norm=True, norm_output=True
    )
    stored = load_file(folder / "model.safetensors")
    stored |= {f"fc_norm.{i}.weight": torch.randn(HIDDEN) for i in range(3)}
    write_folder(folder, json.loads((folder / "config.json").read_text()), stored)
    drafter = load(folder, kimi)
    assert isinstance(drafter, MLAEagle3) and drafter.embed is kimi.embed
    ids, hidden, _ = inputs(1)
    w, eps, p = tensors_of(folder), 1e-5, layer_prefix
    embedded = norm(kimi.embed.weight[ids], w[f"{p}input_layernorm.weight"], eps)
    x = torch.cat((embedded, norm(hidden, w[f"{p}hidden_norm.weight"], eps)), -1)
    heads = their_attention(folder, w, p, x)
    expected = mlp(hidden + heads @ w[f"{p}self_attn.o_proj.weight"].T, w, p, eps)
    expected = norm(expected, w["norm.weight"], eps)  # norm_output: the next forward reads it
    got = run_layer(drafter, ids, hidden)
    # transformers turns by float32 angles, here they are float64
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(drafter.logits(got), got @ w["lm_head.weight"].T, rtol=1e-9, atol=1e-9)
    aux = torch.randn(T, 3 * HIDDEN, dtype=torch.float64)
    parts = [norm(a, w[f"fc_norm.{i}.weight"], eps) for i, a in enumerate(aux.split(HIDDEN, 1))]
    torch.testing.assert_close(drafter.feature(aux), torch.cat(parts, 1) @ w["fc.weight"].T)


def test_its_cache_is_latent_and_its_rope_its_own(tmp_path: Path, kimi: DecoderModel) -> None:
    drafter = load(write_tiny_eagle3_mla(tmp_path, kimi.config.path), kimi)
    assert drafter.kv_shape.bytes_per_place(torch.float64) == (64 + 12) * 8
    assert isinstance(make_attention(drafter.kv_shape, 1, torch.float64), TorchNativeMLA)
    mla, rope = drafter.config.mla, drafter.config.rope
    assert mla is not None and (rope.beta_fast, rope.factor) == (1.0, 4.0)
    assert mla.softmax_scale == pytest.approx(32**-0.5 * (0.1 * 1.3862943611 + 1) ** 2)


@pytest.mark.parametrize(
    "name,means",
    [
        ("LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        ("Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3"),
        ("Eagle3DraftModel", "LlamaForCausalLMEagle3"),
        ("Eagle3DeepseekV3ForCausalLM", "Eagle3DeepseekV2ForCausalLM"),
    ],
)
def test_names_of_the_same_thing(tmp_path: Path, kimi: DecoderModel, name: str, means: str) -> None:
    write = write_tiny_eagle3_mla if "Deepseek" in name else write_tiny_eagle3
    folder = write(tmp_path, kimi.config.path, architectures=[name])
    assert ModelConfig.from_draft_folder(folder, 100).architecture == means
    with pytest.raises(ModelConfigError, match="holds a draft model"):
        ModelConfig.from_folder(folder)


@pytest.mark.parametrize(
    "ids,layers", [([1, 2, 3], (2, 3, 4)), ([2, 3, 4], (2, 3, 4)), (None, (2, 2, 1))], ids=str
)
def test_layer_ids_of_targets_with_latent_attention(
    tmp_path: Path, kimi: DecoderModel, ids: list[int] | None, layers: tuple[int, ...]
) -> None:
    """Outputs if the first is 1, else inputs."""
    eagle = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
    folder = write_tiny_eagle3_mla(tmp_path, kimi.config.path, eagle_config=eagle)
    assert load(folder, kimi).aux_layers == layers


@pytest.mark.parametrize(
    "config,message",
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type 'dflash' is not supported"),
        (
            {"speculators_model_type": "eagle3", "transformer_layer_config": {"model_type": "gemma3"}},
            "transformer_layer_config: model_type 'gemma3' is not supported .llama, qwen3",
        ),
        ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm false is not supported"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm true is not supported"),
        ({"mla_use_nope": True}, "mla_use_nope true is not supported"),
        ({"num_hidden_layers": 2}, "draft models have 1 layer here, this one has 2"),
    ],
)
def test_forms_that_are_refused(
    tmp_path: Path, llama: DecoderModel, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_draft_folder(write_tiny_eagle3(tmp_path, llama.config.path, **config), 100)


def test_a_missing_tensor_is_an_error(tmp_path: Path, kimi: DecoderModel) -> None:
    folder = write_tiny_eagle3_mla(tmp_path, kimi.config.path)
    stored = load_file(folder / "model.safetensors")
    del stored["midlayer.self_attn.kv_b_proj.weight"]
    write_folder(folder, json.loads((folder / "config.json").read_text()), stored)
    with pytest.raises(WeightError, match="missing: midlayer.self_attn.kv_b_proj.weight"):
        load(folder, kimi)
