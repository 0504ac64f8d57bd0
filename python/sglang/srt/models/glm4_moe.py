"""GLM-4.5, 4.6, 4.7 and 4.5-Air: grouped attention that turns half a head, DeepSeek-V3's router.

Biases on q, k and v alone, whatever ``attention_bias`` suggests of o; norms of q and k where the file says
so. The layer after the last is a draft head (NextN), which the model itself has no use for.
"""

from __future__ import annotations

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.moe.layer import MLP
from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.dense import DenseModel, DenseTraits
from sglang.srt.models.moe import take_mlp


class Glm4MoeForCausalLM(DenseModel):
    @classmethod
    def traits(cls, config: ModelConfig) -> DenseTraits:
        return DenseTraits(config.attention_bias, o_bias=False, mlp_bias=False, qk_norm=config.qk_norm)

    def make_mlp(self, config: ModelConfig, source: WeightSource, index: int) -> MLP:
        return take_mlp(source, config, index, self.tp)
