"""Sizes of the target model and of its draft head."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Dims:
    """Shape of a Llama target and its one-layer EAGLE-3 head; the defaults are SmolLM2-135M's."""

    hidden: int = 576
    layers: int = 30
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    ffn: int = 1536
    vocab: int = 49152
    draft_vocab: int = 16384
    eps: float = 1e-5
    theta: float = 1e5
    eos: int = 2
    bos: int = 1
    max_position: int = 8192

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers whose INPUT is a feature of the drafter (the usual default)."""
        return (2, self.layers // 2, self.layers - 3)

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim


TOY = Dims(hidden=32, layers=8, heads=4, kv_heads=2, head_dim=8, ffn=48, vocab=96, draft_vocab=64)
