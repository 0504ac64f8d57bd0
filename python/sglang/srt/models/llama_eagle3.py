"""EAGLE-3 with ordinary attention: ``LlamaForCausalLMEagle3``, and layers like Qwen3's, which norm heads."""

from __future__ import annotations

from sglang.srt.model_loader.weight_source import WeightSource
from sglang.srt.models.draft_heads import DraftHeads, HeadTraits
from sglang.srt.models.eagle3 import Eagle3Model


class LlamaEagle3(Eagle3Model):
    """Whether heads are normed, its tensors say."""

    attention: DraftHeads

    def rope_dim(self) -> int:
        return self.config.head_dim

    def take_attention(self, source: WeightSource, prefix: str) -> DraftHeads:
        config, bias = self.config, self.config.attention_bias
        qk_norm = source.has(f"{prefix}q_norm.weight")
        traits = HeadTraits(2 * config.hidden_size, bias, bias, qk_norm)
        return DraftHeads(config, traits, source, prefix, self.tp)
