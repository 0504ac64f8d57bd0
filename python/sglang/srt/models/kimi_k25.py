"""Kimi-K2.5, K2.6 and K2.7: DeepSeek-V3's form as the language model of one that sees images.

Only the language model is loaded; requests with images are refused where they arrive.
"""

from __future__ import annotations

from typing import Final

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.model_loader.prefixed_source import PrefixedSource
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.mla import MLAModel

_VISION: Final = ("vision_tower.*", "mm_projector.*")


class KimiK25ForConditionalGeneration(MLAModel):
    def __init__(
        self,
        config: ModelConfig,
        source: WeightSource,
        dtype: torch.dtype,
        device: torch.device | str,
        max_positions: int,
        tp: TensorParallel,
    ) -> None:
        inner = PrefixedSource(source, "language_model.", _VISION)
        super().__init__(config, inner, dtype, device, max_positions, tp)
