"""Tiny random models with latent attention, with the names and layouts of real checkpoints.

Every size of a head differs from every other one, and biases of routers and indexers are not zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from helpers.tiny_models import BASE_CONFIG, Draw, Tensors, put_head, target_tensors, write_folder
from helpers.tiny_moe import put_experts

YARN = {
    "type": "yarn",
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}

_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "attention_bias": False,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 0,
}
_SIGMOID = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
_INDEX: dict[str, Any] = {"index_topk": 12, "index_head_dim": 32, "index_n_heads": 8}


def write_tiny_deepseek_v2(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """V2: softmax, groups judged by their best expert. V2-Lite: ``q_lora_rank`` None, ``greedy``."""
    fields = {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
    }
    return _write(folder, seed, fields, config)


def write_tiny_deepseek_v3(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """V3 with its draft head; Kimi-K2: ``model_type`` kimi_k2."""
    fields = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "rope_scaling": YARN,
        "n_group": 4,
        "topk_group": 2,
        "num_nextn_predict_layers": 1,
    }
    return _write(folder, seed, fields | _SIGMOID, config)


def write_tiny_deepseek_v32(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    fields = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "rope_scaling": YARN,
        "n_group": 4,
        "topk_group": 2,
    }
    return _write(folder, seed, fields | _SIGMOID | _INDEX, config)


def write_tiny_glm4_moe_lite(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """GLM-4.7-Flash."""
    fields = {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    }
    return _write(folder, seed, fields | {"topk_method": "noaux_tc", "norm_topk_prob": True}, config)


def write_tiny_glm5(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """GLM-5.2: the third layer takes over the choice of the second."""
    fields = {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "indexer_types": ["full", "full", "shared", "full"],
        "n_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 1,
    }
    return _write(folder, seed, fields | _SIGMOID | _INDEX, config)


def write_tiny_kimi_k25(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """The language model inside, one tensor of the vision tower and one of the projector beside it."""
    text = BASE_CONFIG | _MLA | _SIGMOID
    text |= {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "rope_theta": 50000.0,
        "rope_scaling": YARN,
        "n_group": 1,
        "topk_group": 1,
    }
    text |= config
    draw = Draw(seed + 2)
    tensors = {f"language_model.{name}": t for name, t in _tensors(text, seed).items()}
    tensors["vision_tower.encoder.blocks.0.wqkv.weight"] = draw.linear(96, 32)
    tensors["mm_projector.pre_norm.weight"] = draw.norm(32)
    outer = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"vt_hidden_size": 32, "vt_num_hidden_layers": 1},
        "eos_token_id": text["eos_token_id"],
        "bos_token_id": text["bos_token_id"],
        "media_placeholder_token_id": 250,
        "tie_word_embeddings": False,
    }
    return write_folder(folder, outer, tensors)


def language_model_of(folder: Path, to: Path) -> Path:
    """A Kimi-K2.5 folder's language model as the DeepSeek-V3 that it is, for transformers."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())["text_config"]
    stored = load_file(folder / "model.safetensors")
    inner = {
        n.removeprefix("language_model."): t for n, t in stored.items() if n.startswith("language_model.")
    }
    return write_folder(to, config | {"model_type": "deepseek_v3"}, inner)


def _write(folder: str | Path, seed: int, family: dict[str, Any], config: dict[str, Any]) -> Path:
    fields = BASE_CONFIG | _MLA | family | config
    return write_folder(folder, fields, _tensors(fields, seed))


def _tensors(fields: dict[str, Any], seed: int) -> Tensors:
    draw, last = Draw(seed + 1), fields["num_hidden_layers"]
    nextn = fields["num_nextn_predict_layers"]
    total = fields | {"num_hidden_layers": last + nextn}
    tensors = {name: t for name, t in target_tensors(total, seed).items() if ".self_attn." not in name}
    kinds = fields.get("indexer_types") or ["full"] * last
    for i in range(last + nextn):
        has_indexer = "index_topk" in fields and (i >= last or kinds[i] == "full")
        _put_attention(tensors, fields, f"model.layers.{i}.self_attn.", has_indexer, draw)
    layers = list(range(fields["first_k_dense_replace"], last + nextn))
    put_experts(tensors, fields, layers, fields["n_routed_experts"], draw)
    if fields.get("scoring_func") == "softmax":
        tensors = {name: t for name, t in tensors.items() if not name.endswith("e_score_correction_bias")}
    for i in range(last, last + nextn):
        put_head(tensors, i, draw)
    return tensors


def _put_attention(
    tensors: Tensors, fields: dict[str, Any], prefix: str, has_indexer: bool, draw: Draw
) -> None:
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    rank, latent, rope = fields["q_lora_rank"], fields["kv_lora_rank"], fields["qk_rope_head_dim"]
    nope, v = fields["qk_nope_head_dim"], fields["v_head_dim"]
    if rank is None:
        tensors[f"{prefix}q_proj.weight"] = draw.linear(heads * (nope + rope), hidden, 1.6)
    else:
        tensors[f"{prefix}q_a_proj.weight"] = draw.linear(rank, hidden)
        tensors[f"{prefix}q_a_layernorm.weight"] = draw.norm(rank)
        tensors[f"{prefix}q_b_proj.weight"] = draw.linear(heads * (nope + rope), rank, 1.6)
    # Small, so that the eps of the latents' norms matters.
    tensors[f"{prefix}kv_a_proj_with_mqa.weight"] = draw.linear(latent + rope, hidden, 0.05)
    tensors[f"{prefix}kv_a_proj_with_mqa.weight"][latent:] *= 30.0
    tensors[f"{prefix}kv_a_layernorm.weight"] = draw.norm(latent)
    tensors[f"{prefix}kv_b_proj.weight"] = draw.linear(heads * (nope + v), latent, 1.3)
    tensors[f"{prefix}o_proj.weight"] = draw.linear(hidden, heads * v, 0.25)
    if fields["attention_bias"]:  # where transformers has them
        sizes = {"kv_a_proj_with_mqa": latent + rope, "o_proj": hidden} | ({"q_a_proj": rank} if rank else {})
        for name, size in sizes.items():
            tensors[f"{prefix}{name}.bias"] = draw.normal(size, std=0.1)
    if has_indexer:
        dim, num = fields["index_head_dim"], fields["index_n_heads"]
        tensors[f"{prefix}indexer.wq_b.weight"] = draw.linear(num * dim, rank)
        tensors[f"{prefix}indexer.wk.weight"] = draw.linear(dim, hidden)
        tensors[f"{prefix}indexer.k_norm.weight"] = draw.norm(dim)
        tensors[f"{prefix}indexer.k_norm.bias"] = draw.normal(dim, std=0.5)
        tensors[f"{prefix}indexer.weights_proj.weight"] = draw.linear(num, hidden)
