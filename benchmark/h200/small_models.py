"""A small random model and its drafter as a case to check, packed or not.

They are those of the tests (``test/helpers``), which mostly say the next token by the last one, so that what
is chosen hangs on rounding at few places and drafts are often right; heads are as large as released ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "test"))

import torch
from helpers.quantise import FORMATS, GROUP, Format, Packed, fp8_block, words, write_quantised
from helpers.tiny_drafters import write_tiny_companion, write_tiny_eagle3_mla
from helpers.tiny_models import write_tiny_eagle3

# What the released checkpoints of Kimi-K2.5 and GLM-5 leave unpacked: all but the routed experts.
NOT_EXPERTS: Final = (
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


def _int4_config(*ignored: str) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4_WEIGHTS}},
        "ignore": list(ignored),
    }


PACKED: Final = {
    "int4": Format(
        _int4_config("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        _int4,
        NOT_EXPERTS,
    ),
    "nvfp4": replace(FORMATS["nvfp4"], dense=NOT_EXPERTS),
    "int4-all": Format(_int4_config("lm_head"), _int4),
    "fp8-block": replace(
        FORMATS["fp8-block"],
        config=FORMATS["fp8-block"].config | {"weight_block_size": [128, 128]},
        pack=fp8_block(128, 128),
        extra={},
    ),
}

Shape = tuple[int, int, int]  # draft steps, topk, draft tokens
Sizes = Mapping[str, Any]

_TINY: Final = {"num_hidden_layers": 4, "max_position_embeddings": 1024}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    write: Callable[..., Path]  # the target's folder
    algorithm: str  # of speculation
    shape: Shape
    sizes: Sizes  # of the target
    drafter: Sizes  # EAGLE3's
    latent_drafter: bool = False  # EAGLE3's
    config: tuple[tuple[str, Any], ...] = ()  # of the target, beside the sizes
    packed: str | None = None  # the target's weights, one of ``PACKED``
    fp8_cache: bool = False

    def folders(self, root: Path, tiny: bool) -> tuple[Path, Path | None]:
        """Target and drafter, written."""
        target = self.write(root / self.name, **dict(_TINY if tiny else self.sizes) | dict(self.config))
        if self.packed is not None:
            target, _ = write_quantised(target, root / f"{self.name}-packed", PACKED[self.packed])
        own = root / f"{self.name}-drafter"
        if self.algorithm == "STANDALONE":
            return target, write_tiny_companion(own, target)
        if self.algorithm != "EAGLE3":
            return target, None
        write = write_tiny_eagle3_mla if self.latent_drafter else write_tiny_eagle3
        return target, write(own, target, **({} if tiny else self.drafter))
