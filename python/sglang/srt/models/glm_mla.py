"""GLM-4.7-Flash, and GLM-5, 5.1 and 5.2: DeepSeek-V3's form; GLM-5 with indexers, which layers may share."""

from __future__ import annotations

from sglang.srt.models.mla import MLAModel


class Glm4MoeLiteForCausalLM(MLAModel):
    """GLM-4.7-Flash."""


class GlmMoeDsaForCausalLM(MLAModel):
    """GLM-5 and its successors."""
