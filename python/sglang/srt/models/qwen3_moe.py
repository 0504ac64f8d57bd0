"""Qwen3-MoE: Qwen3 with experts in most layers."""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.layer import MLP
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.moe import take_mlp
from sglang.srt.models.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    def make_mlp(self, config: ModelConfig, source: WeightSource, index: int) -> MLP:
        return take_mlp(source, config, index, self.tp)
