"""Architecture names of ``config.json`` to classes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch

from sglang.srt.configs.draft_config import LLAMA_DRAFTER, MLA_DRAFTER
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.deepseek import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
)
from sglang.srt.models.eagle3 import Eagle3Model
from sglang.srt.models.glm4_moe import Glm4MoeForCausalLM
from sglang.srt.models.glm_mla import Glm4MoeLiteForCausalLM, GlmMoeDsaForCausalLM
from sglang.srt.models.gpt_oss import GptOssForCausalLM
from sglang.srt.models.kimi_k25 import KimiK25ForConditionalGeneration
from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle3 import LlamaEagle3
from sglang.srt.models.mistral import MistralForCausalLM
from sglang.srt.models.mla_eagle3 import MLAEagle3
from sglang.srt.models.qwen2 import Qwen2ForCausalLM
from sglang.srt.models.qwen3 import Qwen3ForCausalLM
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM

TARGETS: Final[Mapping[str, type[DecoderModel]]] = MappingProxyType(
    {
        "LlamaForCausalLM": LlamaForCausalLM,
        "MistralForCausalLM": MistralForCausalLM,
        "Qwen2ForCausalLM": Qwen2ForCausalLM,
        "Qwen3ForCausalLM": Qwen3ForCausalLM,
        "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
        "Glm4MoeForCausalLM": Glm4MoeForCausalLM,
        "GptOssForCausalLM": GptOssForCausalLM,
        "DeepseekV2ForCausalLM": DeepseekV2ForCausalLM,
        "DeepseekV3ForCausalLM": DeepseekV3ForCausalLM,
        "DeepseekV32ForCausalLM": DeepseekV32ForCausalLM,
        "KimiK25ForConditionalGeneration": KimiK25ForConditionalGeneration,
        "Glm4MoeLiteForCausalLM": Glm4MoeLiteForCausalLM,
        "GlmMoeDsaForCausalLM": GlmMoeDsaForCausalLM,
    }
)
DRAFTERS: Final[Mapping[str, type[Eagle3Model]]] = MappingProxyType(
    {LLAMA_DRAFTER: LlamaEagle3, MLA_DRAFTER: MLAEagle3}
)


def build_model(
    config: ModelConfig,
    source: WeightSource,
    dtype: torch.dtype,
    device: torch.device | str,
    max_positions: int,
    tp: TensorParallel | None = None,
) -> DecoderModel:
    """Build the target model, or one rank's part of it. ``ModelConfig`` has refused unknown architectures
    already.

    Raises:
        WeightError: the checkpoint's tensors are not those of the config.
        ShardingError: it can't be split over so many ranks.
    """
    tp = tp or TensorParallel()
    return TARGETS[config.architecture](config, source, dtype, device, max_positions, tp)


def build_drafter(
    config: ModelConfig,
    source: WeightSource,
    target: DecoderModel,
    dtype: torch.dtype,
    device: torch.device | str,
    max_positions: int,
) -> Eagle3Model:
    """Build the draft model of ``target``, whose embedding (and lm_head) it may share. It is split over the
    same ranks.

    Raises:
        WeightError: the checkpoint's tensors are not those of the config.
        ModelConfigError: it is a draft model of another target.
    """
    return DRAFTERS[config.architecture](config, source, target, dtype, device, max_positions)
