"""A model with its pool and page table, driven by hand: no slot state, no scheduler."""

from __future__ import annotations

from pathlib import Path

import torch
from helpers.attention_reference import random_page_table

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows
from sglang.srt.layers.attention.mla_native import TorchNativeMLA
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.mem_cache.mla_pool import MLAKVPool
from sglang.srt.mem_cache.pool import CacheShape
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.models.decoder import DecoderModel
from sglang.srt.models.registry import build_model

NUM_SLOTS = 3
MAX_TOKENS = 320


def load_target(folder: Path, dtype: torch.dtype, load_format: str = "auto") -> DecoderModel:
    config = ModelConfig.from_folder(folder)
    source = open_source(folder, load_format, dtype, "cpu", config.quant)
    return build_model(config, source, dtype, "cpu", MAX_TOKENS)


def make_attention(
    shape: CacheShape, page_size: int, dtype: torch.dtype
) -> TorchNativeAttention | TorchNativeMLA:
    """Over a pool in which every usable page is NaN until it is written."""
    max_pages = -(-MAX_TOKENS // page_size)
    num_pages = NUM_SLOTS * max_pages
    pool = shape.make_pool(num_pages, page_size, dtype, "cpu")
    pool.poison(range(1, num_pages + 1))
    table = random_page_table(NUM_SLOTS, max_pages, num_pages, torch.Generator().manual_seed(0))
    if isinstance(pool, MLAKVPool):
        return TorchNativeMLA(pool, table)
    assert isinstance(pool, MHAKVPool)
    return TorchNativeAttention(pool, table)


class Driver:
    """Slot 1 of a model. Each call goes on where the last one stopped."""

    def __init__(self, model: DecoderModel, page_size: int, dtype: torch.dtype) -> None:
        self.model = model
        self.attention = make_attention(model.kv_shape, page_size, dtype)
        self.seq_len = 0

    def prefill(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: [T] -> logits [T, V]."""
        rows = PrefillRows((1,), (self.seq_len,), (len(ids),))
        return self._forward(ids, self.attention.prefill(rows))

    def verify_tree(self, ids: torch.Tensor, depths: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Nodes [N] with their depths and [N, N] bool which of them each sees -> logits [N, V]. The
        sequence stays as long as it was."""
        rows = DecodeRows(
            torch.tensor([1]), torch.tensor([self.seq_len]), self.seq_len, len(ids), Block.TREE, mask[None]
        )
        hidden, _ = self.model.forward(ids, self.seq_len + depths, self.attention.decode(rows))
        return self.model.logits(hidden)

    def decode(self, ids: torch.Tensor) -> torch.Tensor:
        """Several ids at once are what a verification of a chain of drafts runs."""
        lens = torch.tensor([self.seq_len])
        rows = DecodeRows(torch.tensor([1]), lens, self.seq_len + 7, len(ids))
        return self._forward(ids, self.attention.decode(rows))

    def _forward(self, ids: torch.Tensor, attn: object) -> torch.Tensor:
        positions = torch.arange(self.seq_len, self.seq_len + len(ids))
        hidden, _ = self.model.forward(ids, positions, attn)  # type: ignore[arg-type]
        self.seq_len += len(ids)
        return self.model.logits(hidden)
