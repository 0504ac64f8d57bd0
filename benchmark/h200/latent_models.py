"""Small random models with latent attention and experts, in the head sizes of the released ones.

They are those of the tests (``test/helpers``), which mostly say the next token by the last one, so that what
is chosen hangs on rounding at few places and drafts are often right; heads, latents and ropes are Kimi-K2's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

from helpers.tiny_drafters import write_tiny_eagle3_mla
from helpers.tiny_mla import (
    write_tiny_deepseek_v2,
    write_tiny_deepseek_v3,
    write_tiny_glm4_moe_lite,
    write_tiny_kimi_k25,
)
from helpers.tiny_models import write_tiny_eagle3

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
TINY: Final[dict[str, Any]] = {
    "num_hidden_layers": 4,
    "max_position_embeddings": 1024,
}
_DRAFT: Final[dict[str, Any]] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_LITE: Final = (("q_lora_rank", None),)

Shape = tuple[int, int, int]  # draft steps, topk, draft tokens


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    write: Callable[..., Path]  # the target's folder
    algorithm: str  # of speculation
    shape: Shape
    latent_drafter: bool = False  # EAGLE3's
    config: tuple[tuple[str, Any], ...] = ()  # of the target, beside the sizes

    def folders(self, root: Path, tiny: bool) -> tuple[Path, Path | None]:
        """Target and drafter, written."""
        sizes = (TINY if tiny else SIZES) | dict(self.config)
        target = self.write(root / self.name, **sizes)
        if self.algorithm != "EAGLE3":
            return target, None
        own = root / f"{self.name}-drafter"
        if self.latent_drafter:
            return target, write_tiny_eagle3_mla(own, target, **({} if tiny else _DRAFT))
        heads = {} if tiny else {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}
        return target, write_tiny_eagle3(own, target, **heads)


CASES: Final = (
    Case("kimi-eagle3-mla-chain", write_tiny_kimi_k25, "EAGLE3", (3, 1, 4), True),
    Case("kimi-eagle3-mla-tree", write_tiny_kimi_k25, "EAGLE3", (3, 3, 8), True),
    Case("deepseek-v3-nextn-chain", write_tiny_deepseek_v3, "NEXTN", (2, 1, 3)),
    Case("glm-4.7-flash-nextn-tree", write_tiny_glm4_moe_lite, "NEXTN", (2, 3, 6)),
    Case(
        "deepseek-v2-lite-eagle3",
        write_tiny_deepseek_v2,
        "EAGLE3",
        (3, 1, 4),
        config=_LITE,
    ),
)
