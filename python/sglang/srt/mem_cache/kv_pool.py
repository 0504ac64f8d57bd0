"""Keys and values of every layer of one model, in pages that a page table hands out.

A *place* is where one token's K and V lie: ``page * page_size + offset``, the same in every layer.
The target's pool and the drafter's have the same pages, so one page table serves both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang.srt.mem_cache.pool import as_bytes, poison_pages, stored


class MHAKVPool:
    """``num_pages`` usable pages (ids 1 … num_pages) beside the pad page 0.

    K and V of one token and head are adjacent: one gather brings both, and pages of one token
    cost a GPU little.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.num_layers = num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_places = (num_pages + 1) * page_size
        # [layers, places, nkv, 2 (k, v), d]; empty: on a CPU the system commits memory as it is used
        self.kv = torch.empty(
            (num_layers, self.num_places, num_kv_heads, 2, head_dim), dtype=dtype, device=device
        )
        self.kv[:, :page_size].zero_()  # the pad page is read by padded rows: keep it finite

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """[layers, places, …] each: all that the pool holds."""
        return (self.kv,)

    @property
    def bytes(self) -> int:
        return self.kv.numel() * self.kv.element_size()

    def layer_kv(self, layer: int) -> torch.Tensor:
        """[places, nkv, 2, d], a view."""
        return self.kv[layer]

    def keys(self, layer: int) -> torch.Tensor:
        """[places, nkv, d], a view."""
        return self.kv[layer, :, :, 0]

    def values(self, layer: int) -> torch.Tensor:
        """[places, nkv, d], a view."""
        return self.kv[layer, :, :, 1]

    def write(self, layer: int, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """places: [T] int64; k, v: [T, nkv, d]."""
        both = stored(torch.stack((k, v), dim=2), self.kv.dtype)
        as_bytes(self.kv[layer]).index_copy_(0, places, as_bytes(both))

    def move(self, src_places: torch.Tensor, dst_places: torch.Tensor) -> None:
        """Copy places [N] to places [N] in all layers; they may overlap (gathered before written)."""
        kv = as_bytes(self.kv)
        kv.index_copy_(1, dst_places, kv.index_select(1, src_places))

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, for tests: whoever reads a freed place is found out."""
        poison_pages(self.kv, self.num_pages, pages)
