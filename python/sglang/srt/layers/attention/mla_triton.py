"""Latent attention over sgl_kernel: decode and verify rows by its kernel, prefill as in ``mla_native``.

Lengths of decode rows are read on the device, so a step has the same launches whatever they are. On a CPU the
kernels' references run, which is how it is tested.
"""

from __future__ import annotations

import torch

from sgl_kernel.attention import DecodePlan, View, plan_decode
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention, write_latents
from sglang.srt.layers.attention.base import Block, CacheRows, DecodeRows, Product
from sglang.srt.layers.attention.mla import LatentProduct, RawLatents
from sglang.srt.layers.attention.mla_native import Layers, TorchNativeMLA
from sglang.srt.mem_cache.mla_pool import MLAKVPool


class TritonMLA(TorchNativeMLA):
    """``AttentionBackend`` over one pool. ``page_table`` [slots, max_pages] int32 has another owner."""

    def __init__(
        self,
        pool: MLAKVPool,
        page_table: torch.Tensor,
        num_heads: int,  # of queries
        rank: int,  # R, of the latents without the turned key
        pdl: bool = False,
    ) -> None:
        super().__init__(pool, page_table)
        assert len(pool.tensors) == 1, "no kernel attends to what an indexer chooses"
        latents, self.page_table = pool.latents, page_table
        self._workspace = LatentWorkspace(
            num_heads, rank, pool.page_size, latents.device, latents.element_size(), pdl=pdl
        )

    def reserve(self, max_rows: int, max_query_len: int, scratch_places: int = 0) -> None:
        """Allocate for steps of up to this size; needed before a CUDA graph is captured."""
        self._workspace.reserve(max_rows, max_query_len)

    def write(self, layer: int, product: Product, rows: CacheRows) -> None:
        assert isinstance(product, RawLatents)
        of_tokens = product.positions.of_tokens
        slots = rows.slots.repeat_interleave(rows.query_len, output_size=of_tokens.shape[0])
        places = self.places(slots, of_tokens)
        latents = self.pool.layer_latents(layer)
        write_latents(product.entries(), slots, places, latents, product.latent_dim, pdl=rows.pdl)

    def _decode(self, rows: DecodeRows) -> Layers:
        queries = rows.query_len
        if rows.block is Block.NONE:
            view = View(queries)
        elif rows.block is Block.CAUSAL:
            view = View(queries, extra=queries, causal=True)
        else:
            assert rows.tree_mask is not None
            view = View(queries, extra=queries, mask=rows.tree_mask)
        plan = plan_decode(self._workspace, rows.slots, rows.base_len, self.page_table, view)
        return _DecodeLayers(self.pool, plan)


class _DecodeLayers:
    """Rows of Q queries each by one plan, which is good until the backend's next one."""

    def __init__(self, pool: MLAKVPool, plan: DecodePlan) -> None:
        self._pool = pool
        self._plan = plan
        queries, slots = plan.view.query_len, plan.slots
        # [T] int64: which tokens are padding
        self._slots = slots.repeat_interleave(queries, output_size=queries * slots.shape[0])

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        assert not product.sparse
        latents, plan = self._pool.layer_latents(layer), self._plan
        if plan.view.writes:
            write_latents(product.latent, self._slots, plan.places, latents, product.heads.latent_dim)
        out = latent_attention(product.absorbed(), latents, plan, product.scale)
        return product.heads.values(out)
