"""What steps, workers and tests ask of a pool, whatever its models keep of a token.

A *place* is where one token's entries lie: ``page * page_size + offset``, the same in every layer and
every tensor of a pool. Pools of one worker have the same pages, so one page table serves them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

LARGEST_FP8: Final = 448.0  # of float8_e4m3fn, which has no infinity


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as a cache of ``dtype`` keeps it: what is too large for a narrow type becomes its largest."""
    if x.dtype == dtype:
        return x
    if dtype == torch.float8_e4m3fn:
        x = x.clamp(-LARGEST_FP8, LARGEST_FP8)  # NaN stays
    return x.to(dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory, for copies: few operations know of types of one byte."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


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

    def bytes_per_place(self, dtype: torch.dtype, exact: torch.dtype | None = None) -> int:
        """Of all its layers. ``exact``: the type of what must not be rounded (an indexer's keys, by which
        is chosen); None: ``dtype``."""
        ...

    def make_pool(
        self,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str,
        exact: torch.dtype | None = None,
    ) -> KVPool: ...


def poison_pages(by_layer: torch.Tensor, num_pages: int, pages: Sequence[int]) -> None:
    """by_layer: [layers, places, …], with the pad page's places before those of ``num_pages`` pages."""
    by_page = by_layer.view(by_layer.shape[0], num_pages + 1, -1)  # [layers, pages, …]
    index = torch.tensor(list(pages), dtype=torch.int64, device=by_layer.device)
    # All bits set are a NaN of float8_e4m3fn.
    as_bytes(by_page).index_fill_(1, index, 0xFF if by_page.dtype.itemsize == 1 else float("nan"))
