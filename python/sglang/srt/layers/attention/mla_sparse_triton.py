"""Latent attention to what an indexer chooses, over sgl_kernel (its references on a CPU).

Every query attends to a list of places of its own, which is the page table of the latent kernel. Decode and
verify rows, and levels of draft trees, read their lengths on the device. Prefill chunks that see no more than
``top_k`` places are attended to as without an indexer, the others as in ``mla_sparse_chunks``.
"""

from __future__ import annotations

import torch

from sgl_kernel.attention import View
from sgl_kernel.attention.mla.indexing.op import choose_places
from sgl_kernel.attention.mla.indexing.plan import IndexWorkspace
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention, write_latents
from sgl_kernel.attention.mla.preparing.ops import latent_values
from sglang.srt.configs.mla_config import IndexConfig
from sglang.srt.layers.attention.base import (
    Block,
    CacheRows,
    DecodeRows,
    LayerAttention,
    PrefillRows,
    Product,
    ScratchRows,
)
from sglang.srt.layers.attention.mla import RawLatents
from sglang.srt.layers.attention.mla_sparse_chunks import (
    BLOCK_ROWS,
    ROW_QUERIES,
    ChunkByChunk,
    ChunkTokens,
    LongChunk,
    ShortChunks,
    SparsePlan,
    SparseWorkspace,
    num_lines,
    write_index_keys,
)
from sglang.srt.layers.attention.mla_triton import (
    HeadSizes,
    TritonMLA,
    absorb_and_write,
    overlaps,
    token_slots,
)
from sglang.srt.mem_cache.mla_pool import MLAKVPool


class TritonSparseMLA(TritonMLA):
    """``KernelAttention`` over one pool. ``page_table`` [slots, max_pages] int32 has another owner."""

    def __init__(
        self,
        pool: MLAKVPool,
        page_table: torch.Tensor,
        sizes: HeadSizes,
        index: IndexConfig,
        pdl: bool = False,
    ) -> None:
        super().__init__(pool, page_table, sizes, pdl)
        self._top_k = index.top_k
        self._max_len = page_table.shape[1] * pool.page_size
        device, itemsize = pool.latents.device, pool.latents.element_size()
        sieve = None
        workspaces = []
        for _ in range(2):
            of_index = IndexWorkspace(
                index.num_heads, index.head_dim, index.top_k, pool.page_size, device, itemsize,
                pdl=pdl, sieve=sieve,
            )  # fmt: skip
            sieve = of_index.sieve
            over = LatentWorkspace(sizes.num_heads, sizes.rank, 1, device, itemsize, pdl=pdl)
            workspaces.append(SparseWorkspace(of_index, over, page_table))
        # Two: plans of decode rows last a step, those of a chunk's blocks come and go beside them.
        self._of_rows, self._of_blocks = workspaces
        # An indexer's keys of tree drafts, [layers with one, rows, S, d]
        self._index_scratch = pool.index_keys.new_empty((len(pool.index_keys), 0, 0, index.head_dim))

    def reserve(self, max_rows: int, max_query_len: int, scratch_places: int = 0) -> None:
        """Allocate for steps of up to this size; needed before a CUDA graph is captured."""
        self._of_rows.reserve(max_rows, max_query_len, self._max_len + scratch_places)
        self._of_blocks.reserve(BLOCK_ROWS, ROW_QUERIES, self._max_len)
        if scratch_places:
            self._grow_scratch(max_rows, scratch_places)

    def write(self, layer: int, product: Product, rows: CacheRows) -> None:
        super().write(layer, product, rows)
        assert isinstance(product, RawLatents)
        of_tokens, queries = product.positions.of_tokens, rows.query_len
        slots = rows.slots
        if queries > 1:
            slots = slots.repeat_interleave(queries, output_size=of_tokens.shape[0])
        places = self.places(slots, of_tokens)
        if rows.counts is not None:
            counted = torch.arange(queries, device=slots.device) < rows.counts[:, None]
            slots = torch.where(counted.reshape(-1), slots, 0)  # nothing is written for the pad slot
        write_index_keys(self.pool, layer, product.index, slots, places, rows.pdl)

    def scratch(self, rows: ScratchRows) -> LayerAttention:
        num_rows, queries, num_places = rows.scratch_mask.shape
        assert queries == rows.query_len and num_places == rows.write_start + queries
        self._grow_scratch(num_rows, num_places)
        view = View(queries, num_places, mask=rows.scratch_mask, scratch=True, write_start=rows.write_start)
        cap, longest = self._scratch.shape[2], self._max_len + num_places
        plan = self._of_rows.plan(rows.slots, rows.base_len, view, longest, scratch_cap=cap)
        return _SparseLayers(self, plan)

    def layer_index_scratch(self, layer: int) -> torch.Tensor:
        """[rows, S, d], a view; of a layer with an indexer, which a drafter's only one is."""
        assert self.pool.num_layers == 1, "only a drafter of one layer"
        return self._index_scratch[layer]

    def _decode(self, rows: DecodeRows) -> LayerAttention:
        assert rows.ragged is None, "rows with fewer queries are for ordinary attention"
        queries = rows.query_len
        if rows.block is Block.NONE:
            view = View(queries)
        elif rows.block is Block.CAUSAL:
            view = View(queries, extra=queries, causal=True)
        else:
            assert rows.tree_mask is not None
            view = View(queries, extra=queries, mask=rows.tree_mask)
        return _SparseLayers(self, self._of_rows.plan(rows.slots, rows.base_len, view, self._max_len))

    def _prefill(self, rows: PrefillRows) -> LayerAttention:
        parts: list[tuple[int, LayerAttention]] = []
        short: list[tuple[int, int, int]] = []
        for chunk in zip(rows.slots, rows.starts, rows.query_lens, strict=True):
            _, start, length = chunk
            if start + length <= self._top_k:
                short.append(chunk)
                continue
            parts += self._short(short)
            short = []
            chosen = self.page_table.new_empty(num_lines(length), self._top_k)
            parts.append((length, LongChunk(self.pool, self._of_blocks, self._tokens(*chunk), chosen)))
        return ChunkByChunk([*parts, *self._short(short)])

    def _short(self, chunks: list[tuple[int, int, int]]) -> list[tuple[int, LayerAttention]]:
        """Slot, start and length of each -> how many tokens they have, and their attention. None: nothing."""
        if not chunks:
            return []
        slots, starts, lengths = zip(*chunks, strict=True)
        dense = super()._prefill(PrefillRows(slots, starts, lengths))
        tokens = [self._tokens(*chunk) for chunk in chunks]
        return [(sum(lengths), ShortChunks(self.pool, dense, tokens))]

    def _tokens(self, slot: int, start: int, length: int) -> ChunkTokens:
        return ChunkTokens.make(self.page_table, self.page_size, slot, start, length)

    def _grow_scratch(self, num_rows: int, num_places: int) -> None:
        super()._grow_scratch(num_rows, num_places)
        held, (rows, places) = self._index_scratch, self._scratch.shape[1:3]
        if held.shape[1:3] == (rows, places):
            return
        grown = held.new_empty((held.shape[0], rows, places, held.shape[3]))
        grown[:, : held.shape[1], : held.shape[2]] = held
        self._outgrown.append(held)
        self._index_scratch = grown


class _SparseLayers:
    """Rows of Q queries each by one plan, which is good until the backend's next one."""

    def __init__(self, backend: TritonSparseMLA, plan: SparsePlan) -> None:
        self._backend = backend
        self._plan = plan
        self._slots = token_slots(plan.index.rows)
        self._has_chosen = False

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, RawLatents)
        backend, rows, heads = self._backend, self._plan.index.rows, product.heads
        queries, scratch = absorb_and_write(backend, layer, product, rows, self._slots)
        latents, pdl = backend.pool.layer_latents(layer), overlaps(product)
        self._choose(layer, product, pdl)
        sums = latent_attention(queries, latents, self._plan.over, product.scale, scratch=scratch)
        return latent_values(sums, heads.weight[:, heads.key_dim :], pdl=pdl)

    def _choose(self, layer: int, product: RawLatents, pdl: bool) -> None:
        """By this layer's indexer; without one, as the last layer that had one."""
        backend, plan, index = self._backend, self._plan.index, product.index
        if index is not None:
            keys = backend.pool.layer_index_keys(layer)
            scratch = backend.layer_index_scratch(layer) if plan.rows.view.scratch else None
            if plan.rows.view.writes:
                target = keys if scratch is None else scratch.flatten(0, 1)
                write_latents(index.k, self._slots, plan.rows.places, target, 0, pdl=pdl)
            choose_places(index.q, index.weights, keys, plan, scratch)
            self._has_chosen = True
        assert product.sparse and self._has_chosen, f"layer {layer} has no indexer, nor had one before it"
