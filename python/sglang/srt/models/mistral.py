"""Mistral: Llama's form without biases."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.models.dense import DenseModel, DenseTraits


class MistralForCausalLM(DenseModel):
    @classmethod
    def traits(cls, config: ModelConfig) -> DenseTraits:
        return DenseTraits(qkv_bias=False, o_bias=False, mlp_bias=False, qk_norm=False)
