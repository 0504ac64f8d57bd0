"""Prefill chunks whose queries attend to what an indexer chooses, and the plans they share with decode rows.

A chunk goes through in blocks of queries, so that no matrix of all its scores is ever there. Every query
attends to a list of places of its own, which is the page table of the latent kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch

from sgl_kernel.attention import DecodePlan, View, plan_decode
from sgl_kernel.attention.mla.indexing.op import choose_places
from sgl_kernel.attention.mla.indexing.plan import IndexPlan, IndexWorkspace, plan_index
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention, write_latents
from sgl_kernel.attention.mla.preparing.ops import absorb_queries, latent_values, prepare_latents
from sgl_kernel.rope.ops import TokenRows
from sglang.srt.layers.attention.base import LayerAttention, Product, pool_places
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.attention.mla import IndexProduct, RawLatents
from sglang.srt.layers.attention.mla_triton import new_latents, rope_tables
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
        scratch_cap: int = 0,
    ) -> SparsePlan:
        table = self._page_table
        index = plan_index(self._index, slots, base_len, table, view, max_len, chosen, scratch_cap)
        single = View(1, scratch=view.scratch)
        over = plan_decode(self._over, index.ids, index.counts, index.chosen, single, scratch_cap)
        return SparsePlan(index, over)


def write_index_keys(
    pool: MLAKVPool,
    layer: int,
    index: IndexProduct | None,
    slots: torch.Tensor,  # [T] int64; nothing is written for the pad slot
    places: torch.Tensor,  # [T] int64
    pdl: bool = False,
) -> None:
    if index is not None:
        # As a turned key without a latent: a token that is broken gets nothing but NaN.
        write_latents(index.k, slots, places, pool.layer_index_keys(layer), 0, pdl=pdl)


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """Of one chunk."""

    start: int  # places in the cache before it
    slots: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    places: torch.Tensor  # [T] int64

    @classmethod
    def make(
        cls, page_table: torch.Tensor, page_size: int, slot: int, start: int, length: int
    ) -> ChunkTokens:
        positions = torch.arange(start, start + length, device=page_table.device)
        slots = torch.full_like(positions, slot)
        return cls(start, slots, positions, pool_places(page_table, page_size, slots, positions))


@dataclass(frozen=True, slots=True)
class _Block:
    tokens: slice  # of the chunk
    rows: slice  # the first query of each row
    view: View
    max_len: int
    lines: slice  # of the lists of places, the first of which is for padding


def _blocks(start: int, length: int) -> list[_Block]:
    in_rows = length // ROW_QUERIES * ROW_QUERIES
    step = BLOCK_ROWS * ROW_QUERIES
    cuts = [(begin, min(begin + step, in_rows), ROW_QUERIES) for begin in range(0, in_rows, step)]
    if in_rows < length:
        cuts.append((in_rows, length, 1))
    blocks = []
    for number, (begin, end, queries) in enumerate(cuts):
        view = View(queries, extra=queries, causal=True)
        lines = slice(begin + number, end + number + 1)
        blocks.append(_Block(slice(begin, end), slice(begin, end, queries), view, start + end, lines))
    return blocks


def num_lines(length: int) -> int:
    """Lists of places that a chunk of so many queries has room for."""
    return length + len(_blocks(0, length))


class LongChunk:
    """A chunk of which some queries see more places than they may attend to."""

    def __init__(
        self,
        pool: MLAKVPool,
        workspace: SparseWorkspace,
        tokens: ChunkTokens,
        chosen: torch.Tensor,  # [num_lines(length), top_k] int32, this chunk's until the step is done
    ) -> None:
        self._pool = pool
        self._workspace = workspace
        self._tokens = tokens
        self._chosen = chosen
        self._blocks = _blocks(tokens.start, len(tokens.slots))
        self._has_chosen = False

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, RawLatents)
        tokens, latents = self._tokens, self._pool.layer_latents(layer)
        of_tokens = TokenRows(tokens.slots, product.positions.of_tokens)
        new = new_latents(product, latents, tokens.places)
        prepare_latents(None, None, new, rope_tables(product), of_tokens, interleaved=product.interleaved)
        write_index_keys(self._pool, layer, product.index, tokens.slots, tokens.places)
        self._has_chosen |= product.index is not None
        assert product.sparse and self._has_chosen, f"layer {layer} has no indexer, nor had one before it"
        return torch.cat([self._attend(layer, block, product) for block in self._blocks])

    def _attend(self, layer: int, block: _Block, product: RawLatents) -> torch.Tensor:
        """[T', nq, v]"""
        tokens, heads, q = self._tokens, product.heads, product.q[block.tokens]
        slots, turned_by = tokens.slots[block.tokens], product.positions.of_tokens[block.tokens]
        first = tokens.positions[block.rows].contiguous()
        plan = self._workspace.plan(
            slots[: len(first)], first, block.view, block.max_len, self._chosen[block.lines]
        )
        if product.index is not None:
            index, keys = product.index.take(block.tokens), self._pool.layer_index_keys(layer)
            choose_places(index.q, index.weights, keys, plan.index)
        latents = self._pool.layer_latents(layer)
        queries = absorb_queries(
            q,
            heads.weight,
            q.new_empty(*q.shape[:2], latents.shape[1]),
            None,
            rope_tables(product),
            TokenRows(slots, turned_by),
            interleaved=product.interleaved,
        )
        sums = latent_attention(queries, latents, plan.over, product.scale)
        return latent_values(sums, heads.weight[:, heads.key_dim :])


class ShortChunks:
    """Chunks that see no more places than a query may attend to: they attend to all of them."""

    def __init__(self, pool: MLAKVPool, dense: LayerAttention, tokens: Sequence[ChunkTokens]) -> None:
        self._pool = pool
        self._dense = dense  # writes the latents
        self._slots = torch.cat([chunk.slots for chunk in tokens])  # [T] int64
        self._places = torch.cat([chunk.places for chunk in tokens])  # [T] int64

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, RawLatents)
        write_index_keys(self._pool, layer, product.index, self._slots, self._places)
        return self._dense(layer, replace(product, sparse=False, index=None))


class ChunkByChunk:
    """Chunks one after the other. None reads what another one writes in the same step."""

    def __init__(self, parts: Sequence[tuple[int, LayerAttention]]) -> None:
        self._parts = parts  # number of tokens, and their attention
        self._positions: list[Positions] = []  # of each part, for all layers

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, RawLatents)
        if len(self._parts) == 1:
            return self._parts[0][1](layer, product)
        ends = torch.tensor([count for count, _ in self._parts]).cumsum(0).tolist()
        slices = [slice(end - count, end) for end, (count, _) in zip(ends, self._parts, strict=True)]
        if not self._positions:
            rope, of_tokens = product.positions.rope, product.positions.of_tokens
            # A copy begins at a multiple of 16 bytes: the kernels are compiled for that.
            self._positions = [Positions(rope, of_tokens[tokens].clone()) for tokens in slices]
        parts = zip(slices, self._positions, self._parts, strict=True)
        return torch.cat([attend(layer, product.take(tokens, own)) for tokens, own, (_, attend) in parts])
