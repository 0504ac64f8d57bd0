"""Qwen3 (dense): q and k are normed per head before the rope."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.dense import DenseModel, DenseTraits


class Qwen3ForCausalLM(DenseModel):
    @classmethod
    def traits(cls, config: ModelConfig) -> DenseTraits:
        return DenseTraits(config.attention_bias, config.attention_bias, mlp_bias=False, qk_norm=True)
