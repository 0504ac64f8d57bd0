"""Prefill chunks whose queries attend to what an indexer chooses, and what they share with decode rows.

A chunk goes through in blocks of queries. Every query attends to a list of places of its own, which is the
page table of the latent kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from sgl_kernel.attention import DecodePlan, View, plan_decode
from sgl_kernel.attention.mla.indexing.op import choose_places
from sgl_kernel.attention.mla.indexing.plan import IndexPlan, IndexWorkspace, plan_index
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention, write_latents
from sglang.srt.layers.attention.mla import IndexProduct, LatentProduct
from sglang.srt.layers.attention.mla_native import Layers
from sglang.srt.layers.attention.rows import PagedRows
from sglang.srt.mem_cache.mla_pool import MLAKVPool

ROW_QUERIES: Final = 4
"""A chunk's queries are scored by rows of so many, which read their keys together; the last ones singly."""

BLOCK_ROWS: Final = 128
"""Such rows of a block: 512 queries, of which at 64k places the scores take 128 MiB."""


@dataclass(frozen=True, slots=True)
class SparsePlan:
    index: IndexPlan  # whose choice of places …
    over: DecodePlan  # … is the page table of this


class SparseWorkspace:
    """Buffers of plans, each good until the next one."""

    def __init__(self, index: IndexWorkspace, over: LatentWorkspace, page_table: torch.Tensor) -> None:
        self._index = index
        self._over = over
        self._page_table = page_table  # [slots, max_pages] int32

    def reserve(self, max_rows: int, max_query_len: int, max_len: int) -> None:
        self._index.reserve(max_rows, max_query_len)
        self._index.reserve_scores(max_rows * max_query_len, max_len)
        self._over.reserve(max_rows * max_query_len, 1)

    def plan(
        self,
        slots: torch.Tensor,  # [R] int64
        base_len: torch.Tensor,  # [R] int64
        view: View,
        max_len: int,  # of a row, with its queries' own places
        chosen: torch.Tensor | None = None,  # [R * Q + 1, top_k] int32
    ) -> SparsePlan:
        index = plan_index(self._index, slots, base_len, self._page_table, view, max_len, chosen)
        return SparsePlan(index, plan_decode(self._over, index.ids, index.counts, index.chosen, View(1)))


@dataclass(frozen=True, slots=True)
class Entries:
    """What the cache keeps of T tokens in one layer."""

    latent: torch.Tensor  # [T, R + r]
    index: IndexProduct | None  # its keys [T, d]
    latent_dim: int  # R


def write_entries(
    pool: MLAKVPool,
    layer: int,
    entries: Entries,
    slots: torch.Tensor,  # [T] int64; nothing is written for the pad slot
    places: torch.Tensor,  # [T] int64
    pdl: bool = False,
) -> None:
    latents = pool.layer_latents(layer)
    write_latents(entries.latent, slots, places, latents, entries.latent_dim, pdl=pdl)
    if entries.index is not None:
        # As a turned key without a latent: a token that is broken gets nothing but NaN.
        write_latents(entries.index.k, slots, places, pool.layer_index_keys(layer), 0, pdl=pdl)


@dataclass(frozen=True, slots=True)
class Chunk:
    slot: int
    start: int  # places in the cache before it
    length: int


@dataclass(frozen=True, slots=True)
class _Block:
    tokens: slice  # of the chunk
    slots: torch.Tensor  # [R] int64
    base_len: torch.Tensor  # [R] int64
    view: View
    max_len: int
    chosen: torch.Tensor  # [R * Q + 1, top_k] int32


def _cuts(length: int) -> list[tuple[int, int, int]]:
    """First token, rows and queries a row of each block."""
    in_rows = length // ROW_QUERIES
    cuts = [
        (row * ROW_QUERIES, min(BLOCK_ROWS, in_rows - row), ROW_QUERIES)
        for row in range(0, in_rows, BLOCK_ROWS)
    ]
    done = in_rows * ROW_QUERIES
    return [*cuts, (done, length - done, 1)] if done < length else cuts


def num_lines(length: int) -> int:
    """Lists of places that a chunk of so many queries has room for; each block has one for padding."""
    return length + len(_cuts(length))


class LongChunk:
    """A chunk of which some queries see more places than they may attend to."""

    def __init__(
        self,
        pool: MLAKVPool,
        rows: PagedRows,
        workspace: SparseWorkspace,
        chunk: Chunk,
        chosen: torch.Tensor,  # [num_lines(length) or more, top_k] int32, this chunk's until the step is done
    ) -> None:
        self._pool = pool
        self._workspace = workspace
        device = chosen.device
        positions = torch.arange(chunk.start, chunk.start + chunk.length, device=device)
        self._slots = torch.full_like(positions, chunk.slot)  # [length] int64
        self._places = rows.places(self._slots, positions)  # [length] int64
        self._blocks: list[_Block] = []
        self._has_chosen = False
        used = 0
        for first, num_rows, queries in _cuts(chunk.length):
            num_tokens = num_rows * queries
            self._blocks.append(
                _Block(
                    slice(first, first + num_tokens),
                    self._slots[:num_rows],
                    positions[first : first + num_tokens : queries].contiguous(),
                    View(queries, extra=queries, causal=True),
                    chunk.start + first + num_tokens,
                    chosen[used : used + num_tokens + 1],
                )
            )
            used += num_tokens + 1

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        entries = Entries(product.latent, product.index, product.heads.latent_dim)
        write_entries(self._pool, layer, entries, self._slots, self._places)
        self._has_chosen |= product.index is not None
        assert product.sparse and self._has_chosen, f"layer {layer} has no indexer, nor had one before it"
        num_heads = product.q_nope.shape[1]
        out = product.q_nope.new_empty(len(self._slots), num_heads, product.heads.value_dim)
        for block in self._blocks:
            out[block.tokens] = self._attend(layer, block, product.take(block.tokens))
        return out

    def _attend(self, layer: int, block: _Block, part: LatentProduct) -> torch.Tensor:
        """[T', nq, v]"""
        plan = self._workspace.plan(block.slots, block.base_len, block.view, block.max_len, block.chosen)
        if part.index is not None:
            keys = self._pool.layer_index_keys(layer)
            choose_places(part.index.q, part.index.weights, keys, plan.index)
        latents = self._pool.layer_latents(layer)
        return part.heads.values(latent_attention(part.absorbed(), latents, plan.over, part.scale))


class ChunkByChunk:
    """Chunks one after the other. None reads what another one writes in the same step."""

    def __init__(self, parts: Sequence[tuple[slice, Layers]]) -> None:
        self._parts = parts  # tokens of a chunk, and its attention

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        return torch.cat([layers(layer, product.take(tokens)) for tokens, layers in self._parts])
