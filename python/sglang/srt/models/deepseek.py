"""DeepSeek-V2 (and V2-Lite), V3, R1 and V3.2; Kimi-K2 and K2-Thinking are V3 by name and form.

V2 routes by softmax, V3 by sigmoid and a bias; V3.2 is V3 with an indexer in every layer. The layer after
the last is a draft head (MTP), which the model itself has no use for.
"""

from __future__ import annotations

from sglang.srt.models.mla import MLAModel


class DeepseekV2ForCausalLM(MLAModel):
    """Queries through a latent, or (V2-Lite) by one product."""


class DeepseekV3ForCausalLM(MLAModel):
    """V3, R1, Kimi-K2."""


class DeepseekV32ForCausalLM(MLAModel):
    """V3.2: sparse attention."""
