"""Llama 2 and 3, and models of the same form (SmolLM2)."""

from __future__ import annotations

from sglang.srt.models.dense import DenseModel


class LlamaForCausalLM(DenseModel):
    """The plain form: biases only where the config says so."""
