"""Small random models with latent attention or experts, in the head sizes of the released ones.

They are those of the tests (``test/helpers``), which mostly say the next token by the last one, so that what
is chosen hangs on rounding at few places and drafts are often right; heads, latents and ropes are Kimi-K2's.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import torch
from helpers.quantise import FORMATS, GROUP, Format, Packed, words, write_quantised
from helpers.tiny_drafters import write_tiny_eagle3_mla
from helpers.tiny_mla import (
    write_tiny_deepseek_v2,
    write_tiny_deepseek_v3,
    write_tiny_deepseek_v32,
    write_tiny_glm4_moe_lite,
    write_tiny_glm5,
    write_tiny_kimi_k25,
)
from helpers.tiny_models import write_tiny_eagle3
from helpers.tiny_moe import write_tiny_qwen3_moe

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
_SPARSE: Final = (("index_topk", 64), ("index_head_dim", 128))  # fewer places than a text has
_QWEN3: Final = (("head_dim", 128), ("num_key_value_heads", 4), ("num_experts", 16))

# What the released checkpoints of Kimi-K2.5 and GLM-5 leave unpacked: all but the routed experts.
_NOT_EXPERTS: Final = (
    "self_attn", "shared_experts", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "eh_proj", "layers.4.",
    "lm_head", "vision_tower", "mm_projector",
)  # fmt: skip


def _int4(weight: torch.Tensor) -> Packed:
    """compressed-tensors' pack-quantized, in groups of 32 without zero points."""
    groups = weight.double().unflatten(1, (-1, GROUP))  # [N, K / 32, 32]
    scale = (groups.abs().amax(dim=2) / 7).bfloat16()
    codes = (groups / scale.double()[..., None]).round().clamp(-8, 7).nan_to_num()
    parts = {
        "weight_packed": words((codes + 8).flatten(1).to(torch.int64).numpy(), 4),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int32),
    }
    return parts, (codes * scale.double()[..., None]).flatten(1)


_INT4_WEIGHTS: Final = {
    "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP,
    "dynamic": False,
}  # fmt: skip
PACKED: Final = {
    "int4": Format(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS}},
            "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
        },
        _int4,
        _NOT_EXPERTS,
    ),
    "nvfp4": replace(FORMATS["nvfp4"], dense=_NOT_EXPERTS),
    "fp8-block": FORMATS["fp8-block"],
}

Shape = tuple[int, int, int]  # draft steps, topk, draft tokens


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    write: Callable[..., Path]  # the target's folder
    algorithm: str  # of speculation
    shape: Shape
    latent_drafter: bool = False  # EAGLE3's
    config: tuple[tuple[str, Any], ...] = ()  # of the target, beside the sizes
    packed: str | None = None  # the target's weights, one of ``PACKED``

    def folders(self, root: Path, tiny: bool) -> tuple[Path, Path | None]:
        """Target and drafter, written."""
        sizes = (TINY if tiny else SIZES) | dict(self.config)
        if self.write is write_tiny_qwen3_moe:
            sizes.pop("n_routed_experts", None)  # it has another name for them, and no bias
        target = self.write(root / self.name, **sizes)
        if self.packed is not None:
            target, _ = write_quantised(target, root / f"{self.name}-packed", PACKED[self.packed])
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
    Case("deepseek-v3.2-eagle3-tree", write_tiny_deepseek_v32, "EAGLE3", (3, 3, 8), config=_SPARSE),
    Case("glm-5-nvfp4-nextn-chain", write_tiny_glm5, "NEXTN", (2, 1, 3), config=_SPARSE, packed="nvfp4"),
    Case("kimi-int4-eagle3-mla", write_tiny_kimi_k25, "EAGLE3", (3, 1, 4), True, packed="int4"),
    Case("qwen3-moe-eagle3", write_tiny_qwen3_moe, "EAGLE3", (3, 1, 4), config=_QWEN3),
    Case(
        "qwen3-moe-fp8-eagle3", write_tiny_qwen3_moe, "EAGLE3", (3, 1, 4), config=_QWEN3, packed="fp8-block"
    ),
)
