"""A random paged cache for tests of attention kernels: NaN wherever a row must not look."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel.attention import AttentionShape
from sgl_kernel.rope.ops import CachePlaces, RopeTables, TokenRows, rope_cache_write


@dataclass(frozen=True, slots=True)
class PagedWorld:
    shape: AttentionShape
    slots: torch.Tensor  # [R] int64, distinct and from 1 on, but for padded rows (0)
    base_lens: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [slots, max_pages] int32
    kv: torch.Tensor  # [places, nkv, 2, d]
    generator: torch.Generator

    def draw(self, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=self.generator, dtype=torch.float64).to(torch.float32)


def paged_world(shape: AttentionShape, lens: list[int], room: int, seed: int = 0) -> PagedWorld:
    """Row r has lens[r] places written and pages for ``room`` more; a length of 0 makes it padding."""
    generator = torch.Generator().manual_seed(seed)
    size, num_rows = shape.page_size, len(lens)
    max_pages = -(-(max(lens) + room) // size)
    pages = torch.randperm(num_rows * max_pages, generator=generator) + 1
    table = torch.zeros(num_rows + 3, max_pages, dtype=torch.int32)
    slots = torch.randperm(num_rows + 2, generator=generator)[:num_rows] + 1
    table[slots] = pages.view(num_rows, max_pages).to(torch.int32)
    kv = torch.full(((num_rows * max_pages + 1) * size, shape.num_kv_heads, 2, shape.head_dim), torch.nan)
    for slot, length in zip(slots.tolist(), lens, strict=True):
        positions = torch.arange(length)
        places = table[slot, positions // size].to(torch.int64) * size + positions % size
        kv[places] = torch.randn(length, *kv.shape[1:], generator=generator)
    base_lens = torch.tensor(lens)
    return PagedWorld(shape, torch.where(base_lens > 0, slots, 0), base_lens, table, kv, generator)


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    kv: torch.Tensor,
    places: torch.Tensor,
    kv_scale: torch.Tensor | None = None,
) -> None:
    """kv[places] = k and v, as a step writes them, with angles of 0.

    k, v: [T, nkv, d]; kv: [places, nkv, 2, d]; places: [T] int64; kv_scale: [nkv, 2].
    """
    num_tokens, num_heads, d = k.shape
    tables = RopeTables(torch.ones(1, d), torch.zeros(1, d))
    rows = TokenRows(torch.ones(num_tokens, dtype=torch.int64), torch.zeros(num_tokens, dtype=torch.int64))
    product = torch.cat((k, v), dim=1).flatten(1)
    cache = CachePlaces(kv, places=places, kv_scale=kv_scale)
    rope_cache_write(product, 0, num_heads, tables, rows, cache=cache)
