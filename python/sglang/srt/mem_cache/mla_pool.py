"""Latents of every layer of one model with multi-head latent attention, and its indexers' keys.

Pages and places are those of ``kv_pool.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.mem_cache.pool import as_bytes, poison_pages, stored


@dataclass(frozen=True, slots=True)
class MLAShape:
    """A latent in every layer, an indexer's key in some (``CacheShape``)."""

    num_layers: int
    latent_dim: int  # the latent and the key that all heads share
    index_layers: tuple[int, ...] = ()  # those that have an indexer of their own, ascending
    index_dim: int = 0

    def bytes_per_place(self, dtype: torch.dtype, exact: torch.dtype | None = None) -> int:
        of_index = len(self.index_layers) * self.index_dim * (exact or dtype).itemsize
        return self.num_layers * self.latent_dim * dtype.itemsize + of_index

    def make_pool(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        exact: torch.dtype | None = None,
    ) -> MLAKVPool:
        return MLAKVPool(self, num_pages, page_size, dtype, device, exact)


class MLAKVPool:
    """``num_pages`` usable pages (ids 1 … num_pages) beside the pad page 0."""

    def __init__(
        self,
        shape: MLAShape,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        exact: torch.dtype | None = None,  # of an indexer's keys; None: as the latents
    ) -> None:
        self.num_layers = shape.num_layers
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_places = (num_pages + 1) * page_size
        self._index_row = {layer: row for row, layer in enumerate(shape.index_layers)}
        # Empty: on a CPU the system commits memory as it is used.
        self.latents = torch.empty(  # [layers, places, R + r]
            (shape.num_layers, self.num_places, shape.latent_dim), dtype=dtype, device=device
        )
        self.index_keys = torch.empty(  # [layers with an indexer, places, d]
            (len(shape.index_layers), self.num_places, shape.index_dim), dtype=exact or dtype, device=device
        )
        for tensor in self.tensors:
            tensor[:, :page_size].zero_()  # the pad page is read by padded rows: keep it finite

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """[layers, places, …] each: all that the pool holds."""
        return (self.latents, self.index_keys) if self._index_row else (self.latents,)

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    def layer_latents(self, layer: int) -> torch.Tensor:
        """[places, R + r], a view."""
        return self.latents[layer]

    def layer_index_keys(self, layer: int) -> torch.Tensor:
        """[places, d], a view; of a layer with an indexer."""
        return self.index_keys[self._index_row[layer]]

    def write(self, layer: int, places: torch.Tensor, latent: torch.Tensor) -> None:
        """places: [T] int64; latent: [T, R + r]."""
        kept = stored(latent, self.latents.dtype)
        as_bytes(self.latents[layer]).index_copy_(0, places, as_bytes(kept))

    def write_index_keys(self, layer: int, places: torch.Tensor, keys: torch.Tensor) -> None:
        """places: [T] int64; keys: [T, d]."""
        self.layer_index_keys(layer).index_copy_(0, places, keys.to(self.index_keys.dtype))

    def move(self, src_places: torch.Tensor, dst_places: torch.Tensor) -> None:
        """Copy places [N] to places [N] in all layers; they may overlap (gathered before written)."""
        for tensor in map(as_bytes, self.tensors):
            tensor.index_copy_(1, dst_places, tensor.index_select(1, src_places))

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, for tests: whoever reads a freed place is found out."""
        for tensor in self.tensors:
            poison_pages(tensor, self.num_pages, pages)
