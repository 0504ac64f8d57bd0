"""Latent attention to what an indexer chooses, over sgl_kernel (its references on a CPU).

Every query attends to a list of places of its own, which is the page table of the latent kernel. Decode and
verify rows read their lengths on the device. A prefill chunk goes through in blocks of queries, so that no
matrix of all its scores is ever there; one that sees no more than ``top_k`` places is attended to as in
``mla_native``.
"""

from __future__ import annotations

import torch

from sgl_kernel.attention import View
from sgl_kernel.attention.mla.indexing.op import choose_places
from sgl_kernel.attention.mla.indexing.plan import IndexWorkspace
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention
from sglang.srt.configs.mla_config import IndexConfig
from sglang.srt.layers.attention.base import Block, CacheRows, DecodeRows, PrefillRows, Product
from sglang.srt.layers.attention.mla import LatentProduct, RawLatents
from sglang.srt.layers.attention.mla_native import Layers, TorchNativeMLA
from sglang.srt.layers.attention.mla_sparse_chunks import (
    BLOCK_ROWS,
    ROW_QUERIES,
    Chunk,
    ChunkByChunk,
    Entries,
    LongChunk,
    SparsePlan,
    SparseWorkspace,
    num_lines,
    write_entries,
)
from sglang.srt.mem_cache.mla_pool import MLAKVPool


class TritonSparseMLA(TorchNativeMLA):
    """``KernelAttention`` over one pool. ``page_table`` [slots, max_pages] int32 has another owner."""

    def __init__(
        self,
        pool: MLAKVPool,
        page_table: torch.Tensor,
        num_heads: int,  # of queries
        rank: int,  # R, of the latents without the turned key
        index: IndexConfig,
        pdl: bool = False,
    ) -> None:
        super().__init__(pool, page_table)
        self.page_table = page_table
        self.top_k = index.top_k
        self.max_len = page_table.shape[1] * pool.page_size
        device, itemsize = pool.latents.device, pool.latents.element_size()
        sieve = None
        workspaces = []
        for _ in range(2):
            of_index = IndexWorkspace(
                index.num_heads, index.head_dim, index.top_k, pool.page_size, device, itemsize,
                pdl=pdl, sieve=sieve,
            )  # fmt: skip
            sieve = of_index.sieve
            over = LatentWorkspace(num_heads, rank, 1, device, itemsize, pdl=pdl)
            workspaces.append(SparseWorkspace(of_index, over, page_table))
        # Two: plans of decode rows last a step, those of a chunk's blocks come and go beside them.
        self._of_rows, self._of_blocks = workspaces
        self._chosen = torch.empty(0, index.top_k, dtype=torch.int32, device=device)

    def reserve(self, max_rows: int, max_query_len: int, scratch_places: int = 0) -> None:
        """Allocate for steps of up to this size; needed before a CUDA graph is captured.

        Levels of draft trees (``scratch_places``) are attended to as in ``mla_native``, on a CPU alone.
        """
        self._of_rows.reserve(max_rows, max_query_len, self.max_len)
        self._of_blocks.reserve(BLOCK_ROWS, ROW_QUERIES, self.max_len)

    def write(self, layer: int, product: Product, rows: CacheRows) -> None:
        assert isinstance(product, RawLatents)
        of_tokens = product.positions.of_tokens
        slots = rows.slots.repeat_interleave(rows.query_len, output_size=of_tokens.shape[0])
        entries = Entries(product.entries(), product.index, product.latent_dim)
        write_entries(self.pool, layer, entries, slots, self.places(slots, of_tokens), rows.pdl)

    def _decode(self, rows: DecodeRows) -> Layers:
        queries = rows.query_len
        if rows.block is Block.NONE:
            view = View(queries)
        elif rows.block is Block.CAUSAL:
            view = View(queries, extra=queries, causal=True)
        else:
            assert rows.tree_mask is not None
            view = View(queries, extra=queries, mask=rows.tree_mask)
        plan = self._of_rows.plan(rows.slots, rows.base_len, view, self.max_len)
        return _DecodeLayers(self.pool, plan)

    def _prefill(self, rows: PrefillRows) -> Layers:
        chosen = self._room_for(sum(num_lines(length) for length in rows.query_lens))
        parts: list[tuple[slice, Layers]] = []
        begin = used = 0
        for slot, start, length in zip(rows.slots, rows.starts, rows.query_lens, strict=True):
            layers: Layers
            if start + length <= self.top_k:
                layers = super()._prefill(PrefillRows((slot,), (start,), (length,)))
            else:
                chunk = Chunk(slot, start, length)
                layers = LongChunk(self.pool, self._rows, self._of_blocks, chunk, chosen[used:])
                used += num_lines(length)
            parts.append((slice(begin, begin + length), layers))
            begin += length
        return ChunkByChunk(parts)

    def _room_for(self, lines: int) -> torch.Tensor:
        """[lines, top_k] int32, good for a step. Made even where no chunk is long: so the largest prefill of
        a start needs what the largest ever needs."""
        if len(self._chosen) < lines:
            self._chosen = self._chosen.new_empty(lines, self.top_k)
        return self._chosen


class _DecodeLayers:
    """Rows of Q queries each by one plan."""

    def __init__(self, pool: MLAKVPool, plan: SparsePlan) -> None:
        self._pool = pool
        self._plan = plan
        rows = plan.index.rows
        queries, slots = rows.view.query_len, rows.slots
        # [T] int64: which tokens are padding
        self._slots = slots.repeat_interleave(queries, output_size=queries * slots.shape[0])
        self._has_chosen = False

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        index, over = self._plan.index, self._plan.over
        if index.rows.view.writes:
            entries = Entries(product.latent, product.index, product.heads.latent_dim)
            write_entries(self._pool, layer, entries, self._slots, index.rows.places)
        if product.index is not None:
            keys = self._pool.layer_index_keys(layer)
            choose_places(product.index.q, product.index.weights, keys, index)
            self._has_chosen = True
        assert product.sparse and self._has_chosen, f"layer {layer} has no indexer, nor had one before it"
        latents = self._pool.layer_latents(layer)
        return product.heads.values(latent_attention(product.absorbed(), latents, over, product.scale))
