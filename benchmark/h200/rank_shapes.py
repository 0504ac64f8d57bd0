"""Models without weights for ``rank_stack.py``: the real shapes of Kimi-K2.5 and GLM-5, and tiny ones."""

from __future__ import annotations

from typing import Any, Final

_SIGMOID: Final = {
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "moe_layer_freq": 1,
}  # fmt: skip
_INT4: Final = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32,
                "dynamic": False,
            },
            "input_activations": None,
        }
    },
    "ignore": [
        "lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}  # fmt: skip
_NVFP4: Final = {
    "quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16,
    "ignore": ["lm_head", "*.self_attn.*", "*.shared_experts.*", "model.layers.[0-2].mlp.*_proj"],
}  # fmt: skip

_KIMI_TEXT: Final[dict[str, Any]] = _SIGMOID | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "vocab_size": 163840,
    "max_position_embeddings": 262144,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn", "factor": 64.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163585,
    "quantization_config": _INT4,
}  # fmt: skip

_GLM5: Final[dict[str, Any]] = _SIGMOID | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 6144,
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 154820,
    "eos_token_id": 154820,
    "quantization_config": _NVFP4,
}

_TINY: Final[dict[str, Any]] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 5,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY_INDEX: Final = {"index_topk": 16, "index_head_dim": 32, "index_n_heads": 4}
_INDEX_FIELDS: Final = ("index_topk", "index_head_dim", "index_n_heads", "indexer_rope_interleave")

MODELS: Final = ("kimi", "glm5", "glm5-dense")


def shape_of(model: str, tiny: bool, num_layers: int | None = None) -> dict[str, Any]:
    """A config.json. ``glm5-dense``: GLM-5 without its indexers, every layer attending to all places.

    num_layers: instead of the model's own.
    """
    config = dict(_KIMI_TEXT if model == "kimi" else _GLM5)
    if tiny:
        config |= _TINY | (_TINY_INDEX if model == "glm5" else {})
    if num_layers is not None:
        config["num_hidden_layers"] = num_layers
    if model == "glm5-dense":
        config |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
        config = {name: value for name, value in config.items() if name not in _INDEX_FIELDS}
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
    if model != "kimi":
        return config
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": config,
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "tie_word_embeddings": False,
    }
