"""Qwen2 and Qwen2.5: biases on q, k and v, which their configs don't mention."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.dense import DenseModel, DenseTraits


class Qwen2ForCausalLM(DenseModel):
    @classmethod
    def traits(cls, config: ModelConfig) -> DenseTraits:
        return DenseTraits(qkv_bias=True, o_bias=False, mlp_bias=False, qk_norm=False)
