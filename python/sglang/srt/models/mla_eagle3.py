"""EAGLE-3 with latent attention (``Eagle3DeepseekV2ForCausalLM``): drafters of Kimi-K2 and its like.

Its rope and softmax scale are its own config's, which differs from the target's. Its latents' norms have the
config's eps, as the code that trains these drafters has (TorchSpec), and not the 1e-6 of a target.
"""

from __future__ import annotations

from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.eagle3 import Eagle3Model
from sglang.srt.models.mla import LatentAttention, LatentPlace


class MLAEagle3(Eagle3Model):
    def rope_dim(self) -> int:
        assert self.config.mla is not None
        return self.config.mla.rope_dim

    def take_attention(self, source: WeightSource, prefix: str) -> LatentAttention:
        config = self.config
        place = LatentPlace(
            prefix,
            layer=0,
            has_indexer=False,
            in_features=2 * config.hidden_size,
            eps=config.rms_norm_eps,
            apart=True,
        )
        return LatentAttention(config, source, place, self.tp)
