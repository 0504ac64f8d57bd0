"""Small random models with latent attention. Heads, latents and ropes are Kimi-K2's."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from helpers.tiny_mla import (
    write_tiny_deepseek_v2,
    write_tiny_deepseek_v3,
    write_tiny_deepseek_v32,
    write_tiny_glm4_moe_lite,
    write_tiny_glm5,
    write_tiny_kimi_k25,
)

from benchmark.h200.small_models import Case

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "max_position_embeddings": 4096,
}
_DRAFT: Final[dict[str, Any]] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_GROUPED: Final = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}

_LITE: Final = (("q_lora_rank", None),)
_SPARSE: Final = (("index_topk", 64), ("index_head_dim", 128))  # fewer places than a text has
_case = partial(Case, sizes=SIZES, drafter=_GROUPED)
_latent = partial(Case, sizes=SIZES, drafter=_DRAFT, latent_drafter=True)

CASES: Final = (
    _latent("kimi-eagle3-mla-chain", write_tiny_kimi_k25, "EAGLE3", (3, 1, 4)),
    _latent("kimi-eagle3-mla-tree", write_tiny_kimi_k25, "EAGLE3", (3, 3, 8)),
    _case("deepseek-v3-nextn-chain", write_tiny_deepseek_v3, "NEXTN", (2, 1, 3)),
    _case("glm-4.7-flash-nextn-tree", write_tiny_glm4_moe_lite, "NEXTN", (2, 3, 6)),
    _case(
        "deepseek-v2-lite-eagle3",
        write_tiny_deepseek_v2,
        "EAGLE3",
        (3, 1, 4),
        config=_LITE,
    ),
    _case("deepseek-v3.2-eagle3-tree", write_tiny_deepseek_v32, "EAGLE3", (3, 3, 8), config=_SPARSE),
    _case("glm-5-nvfp4-nextn-chain", write_tiny_glm5, "NEXTN", (2, 1, 3), config=_SPARSE, packed="nvfp4"),
    _latent("kimi-fp8-cache-eagle3-tree", write_tiny_kimi_k25, "EAGLE3", (3, 3, 8), fp8_cache=True),
    _case("glm-5-fp8-cache-nextn", write_tiny_glm5, "NEXTN", (2, 1, 3), config=_SPARSE, fp8_cache=True),
    _latent("kimi-int4-eagle3-mla", write_tiny_kimi_k25, "EAGLE3", (3, 1, 4), packed="int4"),
)
