"""Small random models with ordinary attention, plain MLPs or experts. A line of ``CASES`` adds one."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from helpers.tiny_models import write_tiny_mistral, write_tiny_qwen2, write_tiny_qwen3
from helpers.tiny_moe import (
    write_tiny_glm4_moe,
    write_tiny_gpt_oss,
    write_tiny_gpt_oss_mxfp4,
    write_tiny_qwen3_moe,
)

from benchmark.h200.small_models import Case

SIZES: Final[dict[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,
    "max_position_embeddings": 4096,
}
_DRAFT: Final = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
_WINDOW: Final = (("sliding_window", 100),)
_QWEN3_MOE: Final = (("num_experts", 16),)
_GLM: Final = (("n_routed_experts", 16), ("num_attention_heads", 24))  # 12 query heads for one of keys
# 8 query heads for one of keys, and a window that texts are longer than
_GPT_OSS: Final = (
    ("num_local_experts", 16), ("num_attention_heads", 16), ("head_dim", 64), ("sliding_window", 100),
)  # fmt: skip

_case = partial(Case, sizes=SIZES, drafter=_DRAFT)

CASES: Final = (
    _case("qwen3-eagle3-chain", write_tiny_qwen3, "EAGLE3", (3, 1, 4)),
    _case("qwen3-eagle3-tree", write_tiny_qwen3, "EAGLE3", (3, 3, 8)),
    _case("qwen3-standalone", write_tiny_qwen3, "STANDALONE", (3, 1, 4)),
    _case("qwen3-ngram", write_tiny_qwen3, "NGRAM", (5, 1, 6)),
    _case("qwen3-fp8-cache-eagle3-tree", write_tiny_qwen3, "EAGLE3", (3, 3, 8), fp8_cache=True),
    _case("qwen2-eagle3-chain", write_tiny_qwen2, "EAGLE3", (3, 1, 4), config=(("head_dim", 64),)),
    _case("mistral-eagle3-chain", write_tiny_mistral, "EAGLE3", (3, 1, 4)),
    _case("mistral-window-eagle3-tree", write_tiny_mistral, "EAGLE3", (3, 3, 8), config=_WINDOW),
    _case("qwen3-moe-eagle3-chain", write_tiny_qwen3_moe, "EAGLE3", (3, 1, 4), config=_QWEN3_MOE),
    _case(
        "qwen3-moe-fp8-eagle3-chain", write_tiny_qwen3_moe, "EAGLE3", (3, 1, 4), config=_QWEN3_MOE,
        packed="fp8-block",
    ),
    _case("glm-4.5-nextn-chain", write_tiny_glm4_moe, "NEXTN", (2, 1, 3), config=_GLM),
    _case("glm-4.5-eagle3-tree", write_tiny_glm4_moe, "EAGLE3", (3, 3, 8), config=_GLM),
    _case("glm-4.5-int4-nextn-tree", write_tiny_glm4_moe, "NEXTN", (2, 3, 6), config=_GLM, packed="int4-all"),
    _case("glm-4.5-fp8-nextn", write_tiny_glm4_moe, "NEXTN", (2, 1, 3), config=_GLM, packed="fp8-block"),
    _case("gpt-oss-eagle3-chain", write_tiny_gpt_oss, "EAGLE3", (3, 1, 4), config=_GPT_OSS),
    _case("gpt-oss-mxfp4-eagle3-chain", write_tiny_gpt_oss_mxfp4, "EAGLE3", (3, 1, 4), config=_GPT_OSS),
    _case("gpt-oss-mxfp4-eagle3-tree", write_tiny_gpt_oss_mxfp4, "EAGLE3", (3, 3, 8), config=_GPT_OSS),
)  # fmt: skip
