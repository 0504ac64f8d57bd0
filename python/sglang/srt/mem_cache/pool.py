"""What steps, workers and tests ask of a pool, whatever its models keep of a token.

A *place* is where one token's entries lie: ``page * page_size + offset``, the same in every layer and
every tensor of a pool. Pools of one worker have the same pages, so one page table serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class KVPool(Protocol):
    num_layers: int
    num_pages: int  # usable ones (ids 1 … num_pages), beside the pad page 0
    page_size: int
    num_places: int

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """[layers, places, …] each: all that the pool holds."""
        ...

    @property
    def bytes(self) -> int: ...

    def move(self, src_places: torch.Tensor, dst_places: torch.Tensor) -> None:
        """Copy places [N] to places [N] in all layers; they may overlap (gathered before written)."""
        ...

    def poison(self, pages: Sequence[int]) -> None:
        """Fill pages with NaN, for tests: whoever reads a freed place is found out."""
        ...


class CacheShape(Protocol):
    """What one model keeps of a token."""

    def bytes_per_place(self, dtype: torch.dtype) -> int:
        """Of all its layers."""
        ...

    def make_pool(
        self, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> KVPool: ...


def poison_pages(by_layer: torch.Tensor, num_pages: int, pages: Sequence[int]) -> None:
    """by_layer: [layers, places, …], with the pad page's places before those of ``num_pages`` pages."""
    by_page = by_layer.view(by_layer.shape[0], num_pages + 1, -1)  # [layers, pages, …]
    index = torch.tensor(list(pages), dtype=torch.int64, device=by_layer.device)
    by_page.index_fill_(1, index, float("nan"))
