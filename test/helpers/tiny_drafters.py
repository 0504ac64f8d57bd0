"""Tiny drafters beside ``write_tiny_eagle3``: other layouts, latent attention, and a model of its own.

All of them guess from the last token's embedding, as the tiny targets mostly do (see ``tiny_models``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import (
    Draw,
    Tensors,
    read_target,
    write_folder,
    write_tiny_eagle3,
)
from safetensors.torch import load_file

DRAFT_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "beta_fast": 1.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
_LAYER_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "max_position_embeddings", "rope_theta",
)  # fmt: skip


def write_tiny_speculators(
    folder: str | Path, target_folder: str | Path, seed: int = 0, *, qwen3: bool = False, **config: Any
) -> Path:
    """As vLLM's speculators saves it: the layer's fields in an object of their own, of which those are left
    out that have transformers' default (here ``rms_norm_eps``); ``norm_before_residual`` is set."""
    folder = write_tiny_eagle3(
        folder, target_folder, seed, layer_prefix="layers.0.", with_embedding=True, rms_norm_eps=1e-6
    )
    flat = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    layer = {name: flat[name] for name in _LAYER_FIELDS}
    if qwen3:
        layer["model_type"] = "qwen3"
        draw = Draw(seed + 7)
        for name in ("q", "k"):
            tensors[f"layers.0.self_attn.{name}_norm.weight"] = draw.norm(flat["head_dim"])
    fields = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "speculators_config": {"algorithm": "eagle3", "default_proposal_method": "greedy"},
        "transformer_layer_config": layer,
        "draft_vocab_size": flat["draft_vocab_size"],
        "target_hidden_size": None,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "torch_dtype": "float32",
    }
    return write_folder(folder, fields | config, tensors)


def write_tiny_eagle3_mla(
    folder: str | Path,
    target_folder: str | Path,
    seed: int = 0,
    draft_vocab: int | None = 192,
    *,
    layer_prefix: str = "midlayer.",
    **config: Any,
) -> Path:
    """``Eagle3DeepseekV2ForCausalLM``, in the layout of lightseek's (``midlayer.``) or NVIDIA's drafters
    (``layers.0.``). Its latent is as wide as its stream, so that values can carry the whole embedding."""
    folder = write_tiny_eagle3(folder, target_folder, seed, draft_vocab)
    flat = json.loads((folder / "config.json").read_text())
    del flat["head_dim"]
    fields = flat | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": flat["hidden_size"],
        "kv_lora_rank": flat["hidden_size"],
        "qk_nope_head_dim": 20,
        "qk_rope_head_dim": 12,
        "v_head_dim": 24,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": DRAFT_YARN,
    }
    fields |= config
    old = load_file(folder / "model.safetensors")
    tensors = {name: t for name, t in old.items() if "self_attn" not in name}
    tensors |= _latent_attention(fields, Draw(seed + 5))
    return write_folder(folder, fields, {n.replace("midlayer.", layer_prefix): t for n, t in tensors.items()})


def _latent_attention(fields: dict[str, Any], draw: Draw) -> Tensors:
    """A place attends to itself, adds its embedding and takes the hidden state away, both normed."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    nope, rope, v = fields["qk_nope_head_dim"], fields["qk_rope_head_dim"], fields["v_head_dim"]
    turn = torch.linalg.qr(draw.normal(hidden, hidden)).Q
    latent = torch.cat((turn, -turn), 1)  # [hidden, 2 * hidden]
    key = draw.linear(nope, hidden)
    q = torch.cat((4.0 * key, draw.linear(rope, hidden, 0.3)))  # [nope + rope, hidden]
    value = torch.cat((torch.eye(hidden), torch.zeros(heads * v - hidden, hidden)))  # [heads * v, hidden]
    kv = torch.cat((key.expand(heads, -1, -1), value.view(heads, v, hidden)), 1)
    p = "midlayer.self_attn."
    return {
        f"{p}q_a_proj.weight": latent.clone(),
        f"{p}q_a_layernorm.weight": draw.norm(hidden),
        f"{p}q_b_proj.weight": q.repeat(heads, 1),
        f"{p}kv_a_proj_with_mqa.weight": torch.cat((latent, draw.linear(rope, 2 * hidden, 0.3))),
        f"{p}kv_a_layernorm.weight": draw.norm(hidden),
        f"{p}kv_b_proj.weight": kv.reshape(-1, hidden),
        f"{p}o_proj.weight": 1.4 * torch.cat((turn.T, draw.linear(hidden, heads * v - hidden, 0.1)), 1),
    }


def write_tiny_companion(folder: str | Path, target_folder: str | Path) -> Path:
    """An independent draft model: a Llama target's ends and its first layer alone."""
    config = json.loads((Path(target_folder) / "config.json").read_text())
    tensors = {
        name: tensor
        for name, tensor in read_target(Path(target_folder)).items()
        if not name.startswith("model.layers.") or name.startswith("model.layers.0.")
    }
    return write_folder(folder, config | {"num_hidden_layers": 1}, tensors)
