"""Tiny random mixtures of experts, with the names and layouts of real checkpoints (see ``tiny_models``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.tiny_models import BASE_CONFIG, Draw, Tensors, put_head, target_tensors, write_folder


def write_tiny_qwen3_moe(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """The first layer has a plain MLP."""
    fields = BASE_CONFIG | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 32,
        "attention_bias": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
        "use_sliding_window": False,
    }
    fields |= config
    tensors = target_tensors(fields, seed)
    dense, step = fields["mlp_only_layers"], fields["decoder_sparse_step"]
    layers = [i for i in range(fields["num_hidden_layers"]) if i not in dense and (i + 1) % step == 0]
    put_experts(tensors, fields, layers, fields["num_experts"], Draw(seed + 1))
    return write_folder(folder, fields, tensors)


def write_tiny_glm4_moe(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """GLM-4.5: half of each head is turned, biases on q, k and v alone, a NextN layer after the last one."""
    fields = BASE_CONFIG | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "head_dim": 32,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "num_nextn_predict_layers": 1,
    }
    fields |= config
    draw, last = Draw(seed + 1), fields["num_hidden_layers"]
    heads = fields["num_nextn_predict_layers"]
    tensors = target_tensors(fields | {"num_hidden_layers": last + heads}, seed)
    tensors = {name: t for name, t in tensors.items() if not name.endswith("o_proj.bias")}
    layers = list(range(fields["first_k_dense_replace"], last + heads))
    put_experts(tensors, fields, layers, fields["n_routed_experts"], draw)
    for layer in range(last, last + heads):
        put_head(tensors, layer, draw)
    return write_folder(folder, fields, tensors)


def write_tiny_gpt_oss(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """GPT-OSS as it is saved in half precision: experts [E, in, out], gate and up interleaved."""
    fields = gpt_oss_config() | config
    return write_folder(folder, fields, gpt_oss_tensors(fields, seed))


def write_tiny_gpt_oss_mxfp4(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """GPT-OSS as it is released: experts [E, out, in] in MXFP4, here rounded from random ones."""
    fields = gpt_oss_config() | config
    tensors = gpt_oss_tensors(fields, seed)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = _mxfp4(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    quantised = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    return write_folder(folder, fields | {"quantization_config": quantised}, tensors)


def _mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, out, in] -> blocks [E, out, in / 32, 16] and scales [E, out, in / 32], bytes."""
    groups = weight.float().unflatten(2, (-1, 32))
    exponent = groups.abs().amax(3).log2().floor().clamp(-100, 0) - 2  # the largest becomes 4 to 6
    values = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
    scaled = groups / exponent.exp2()[..., None]
    code = (scaled.abs()[..., None] - values).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = code[..., ::2] | (code[..., 1::2] << 4)
    return blocks.to(torch.uint8), (exponent + 127).to(torch.uint8)


def gpt_oss_config() -> dict[str, Any]:
    """A window of 24 in every other layer, the first one included; yarn whose ramp is not rounded."""
    return BASE_CONFIG | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 16,
        "intermediate_size": 32,
        "attention_bias": True,
        "sliding_window": 24,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "swiglu_limit": 7.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    }


def gpt_oss_tensors(fields: dict[str, Any], seed: int) -> Tensors:
    draw, num = Draw(seed + 1), fields["num_local_experts"]
    hidden, size = fields["hidden_size"], fields["intermediate_size"]
    tensors = {n: t for n, t in target_tensors(fields, seed).items() if ".mlp." not in n}
    for layer in range(fields["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}self_attn.sinks"] = draw.normal(fields["num_attention_heads"])
        tensors[f"{prefix}mlp.router.weight"] = draw.linear(num, hidden, 1.5)
        tensors[f"{prefix}mlp.router.bias"] = draw.normal(num, std=0.3)
        experts = f"{prefix}mlp.experts."
        # gate and up beyond the clamps now and then
        tensors[f"{experts}gate_up_proj"] = draw.normal(num, hidden, 2 * size, std=3.0 * hidden**-0.5)
        tensors[f"{experts}gate_up_proj_bias"] = draw.normal(num, 2 * size, std=0.3)
        tensors[f"{experts}down_proj"] = draw.normal(num, size, hidden, std=0.05 * size**-0.5)
        tensors[f"{experts}down_proj_bias"] = draw.normal(num, hidden, std=0.05)
    return tensors


def put_experts(
    tensors: Tensors, fields: dict[str, Any], layers: list[int], num_experts: int, draw: Draw
) -> None:
    """Instead of the plain MLPs of ``layers``. What a layer adds stays as small as theirs."""
    hidden, size = fields["hidden_size"], fields["moe_intermediate_size"]
    for layer in layers:
        mlp = f"model.layers.{layer}.mlp."
        for name in [name for name in tensors if name.startswith(mlp)]:
            del tensors[name]
        tensors[f"{mlp}gate.weight"] = draw.linear(num_experts, hidden, 1.5)
        if "n_routed_experts" in fields:
            tensors[f"{mlp}gate.e_score_correction_bias"] = draw.normal(num_experts, std=0.3)
        parts = [f"{mlp}experts.{e}." for e in range(num_experts)]
        if shared := fields.get("n_shared_experts"):
            _put_mlp(tensors, f"{mlp}shared_experts.", hidden, size * shared, draw)
        for part in parts:
            _put_mlp(tensors, part, hidden, size, draw)


def _put_mlp(tensors: Tensors, prefix: str, hidden: int, size: int, draw: Draw) -> None:
    tensors[f"{prefix}gate_proj.weight"] = draw.linear(size, hidden)
    tensors[f"{prefix}up_proj.weight"] = draw.linear(size, hidden)
    tensors[f"{prefix}down_proj.weight"] = draw.linear(hidden, size, 0.2)
