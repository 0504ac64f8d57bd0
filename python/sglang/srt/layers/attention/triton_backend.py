"""Attention over sgl_kernel: Triton on CUDA, its references elsewhere (which is how a CPU tests it).

Lengths are read on the device, so the host never has to know them exactly, and a decode step has the
same launches whatever they are: a CUDA graph of it stays good. Buffers of plans belong to the backend
and are used again by every step, so a ``LayerAttention`` of decode rows is good until the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from sgl_kernel.attention import (
    AttentionShape,
    DecodePlan,
    DecodeWorkspace,
    Turn,
    View,
    can_turn,
    decode_attention,
    plan_decode,
    plan_prefill,
    prefill_attention,
)
from sgl_kernel.rope.ops import CachePlaces, HeadNorms, RopeTables, TokenRows, rope_cache_write
from sglang.srt.layers.attention.base import (
    Block,
    CacheRows,
    DecodeRows,
    LayerAttention,
    PrefillRows,
    Product,
    ScratchRows,
    pool_places,
)
from sglang.srt.layers.attention.heads import HeadProduct, Positions, Scope
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.model_executor.step_plan import PAD_SLOT

MAX_PDL_TOKENS = 32
"""Up to so many tokens the launch behind a product, which turns q and k, overlaps with it."""

MIN_TURN_PDL_TOKENS, MAX_TURN_PDL_TOKENS = 2, 8
"""The same where attention itself turns them: on an H200 0.5 % of a step gained at 4 tokens, 1 % lost at 1
and at 16, where it takes room from the product that it waits for."""


class TritonAttention:
    """``KernelAttention`` over one pool. ``page_table`` [slots, max_pages] int32 has another owner."""

    needs_exact_lens = False

    def __init__(
        self,
        pool: MHAKVPool,
        page_table: torch.Tensor,
        num_heads: int,  # of queries
        kv_scale: torch.Tensor | None = None,  # [layers, nkv, 2] float32, with a pool of float8_e4m3fn
        pdl: bool = False,
        windows: Sequence[int | None] = (None,),  # those that layers have, None: one that sees all
    ) -> None:
        self.pool = pool
        self.page_table = page_table
        self.page_size = pool.page_size
        self._kv_scale = kv_scale
        self._shape = AttentionShape(num_heads, pool.num_kv_heads, pool.head_dim, pool.page_size)
        # A plan for each window, every step: so each has buffers of its own.
        self._workspaces = {
            window: DecodeWorkspace(self._shape, pool.kv.device, pool.kv.element_size(), pdl=pdl)
            for window in windows
        }
        # K and V of tree drafts, [layers, rows, S, nkv, 2, d]
        self._scratch = pool.kv.new_empty((pool.num_layers, 0, 0, *pool.kv.shape[2:]))
        self._outgrown: list[torch.Tensor] = []  # CUDA graphs may hold their addresses

    def reserve(self, max_rows: int, max_query_len: int, scratch_places: int = 0) -> None:
        """Allocate for steps of up to this size; needed before a CUDA graph is captured."""
        for workspace in self._workspaces.values():
            workspace.reserve(max_rows, max_query_len)
        if scratch_places:
            self._grow_scratch(max_rows, scratch_places)

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool places of (slot, position) pairs; same shape as its arguments, int64."""
        return pool_places(self.page_table, self.page_size, slots, positions)

    def write(self, layer: int, product: Product, rows: CacheRows) -> None:
        assert isinstance(product, HeadProduct) and product.num_heads == 0
        rope = product.positions.rope
        rope_cache_write(
            product.qkv,
            0,
            product.num_kv_heads,
            RopeTables(rope.cos, rope.sin),
            TokenRows(rows.slots, rows.root, counts=rows.counts),
            cache=CachePlaces(
                self.pool.layer_kv(layer),
                self.page_table,
                self.page_size,
                kv_scale=self.layer_scale(layer),
                pad_slot=PAD_SLOT,
            ),
            norms=_norms(product),
            pdl=rows.pdl,
        )

    def decode(self, rows: DecodeRows) -> LayerAttention:
        return self._decode(rows)

    def prefill(self, rows: PrefillRows) -> LayerAttention:
        return self._prefill(rows)

    def mixed(self, decode: DecodeRows, prefill: PrefillRows) -> LayerAttention:
        return self.mixed_with(decode, self._prefill(prefill))

    def mixed_with(self, decode: DecodeRows, prefill: PrefillLayers) -> LayerAttention:
        """``mixed``, with chunks that are planned already."""
        assert decode.query_len == 1
        return _MixedLayers(self._decode(decode), prefill, decode.slots.shape[0])

    def scratch(self, rows: ScratchRows) -> LayerAttention:
        num_rows, num_queries, num_places = rows.scratch_mask.shape
        assert num_queries == rows.query_len and num_places == rows.write_start + num_queries
        self._grow_scratch(num_rows, num_places)
        view = View(
            query_len=num_queries,
            extra=num_places,
            mask=rows.scratch_mask,
            scratch=True,
            write_start=rows.write_start,
        )
        return _DecodeLayers(self, self._plans(rows.slots, rows.base_len, view, self._scratch.shape[2]))

    def _decode(self, rows: DecodeRows) -> _DecodeLayers:
        num_queries = rows.query_len
        if rows.block is Block.NONE:
            view = View(num_queries)
        elif rows.block is Block.CAUSAL:
            start = None if rows.ragged is None else rows.ragged.query_start
            view = View(num_queries, extra=num_queries, causal=True, query_start=start)
        else:
            assert rows.tree_mask is not None
            view = View(num_queries, extra=num_queries, mask=rows.tree_mask)
        plans = self._plans(rows.slots, rows.base_len, view)
        return _DecodeLayers(self, plans, None if rows.ragged is None else rows.ragged.lines)

    def _plans(
        self, slots: torch.Tensor, base_len: torch.Tensor, view: View, scratch_cap: int = 0
    ) -> dict[int | None, DecodePlan]:
        """By the windows that layers have."""
        return {
            window: plan_decode(
                workspace, slots, base_len, self.page_table, replace(view, window=window or 0), scratch_cap
            )
            for window, workspace in self._workspaces.items()
        }

    def _prefill(self, rows: PrefillRows) -> PrefillLayers:
        plan = plan_prefill(
            self._shape,
            self.page_table,
            rows.slots,
            rows.starts,
            rows.query_lens,
            self.pool.kv.element_size(),
        )

        def attend(
            q: torch.Tensor, kv: torch.Tensor, scale: torch.Tensor | None, scope: Scope, out: torch.Tensor
        ) -> torch.Tensor:
            return prefill_attention(q, kv, plan, scale, out, window=scope.window or 0, sinks=scope.sinks)

        return PrefillLayers(self, plan.token_slots, plan.places, attend)

    def layer_scale(self, layer: int) -> torch.Tensor | None:
        """[nkv, 2], or None where the pool holds K and V as they are."""
        return None if self._kv_scale is None else self._kv_scale[layer]

    def layer_scratch(self, layer: int) -> torch.Tensor:
        """[rows, S, nkv, 2, d], a view."""
        return self._scratch[layer]

    def _grow_scratch(self, num_rows: int, num_places: int) -> None:
        """Levels written before stay where they are, as seen from outside."""
        layers, rows, places = self._scratch.shape[:3]
        if num_rows <= rows and num_places <= places:
            return
        capturing = self._scratch.is_cuda and torch.cuda.is_current_stream_capturing()
        assert not capturing, f"reserve() first: {num_rows} rows with {num_places} scratch places"
        grown = self._scratch.new_empty(
            (layers, max(num_rows, rows), max(num_places, places), *self._scratch.shape[3:])
        )
        grown[:, :rows, :places] = self._scratch
        self._outgrown.append(self._scratch)
        self._scratch = grown


def _turn(
    product: HeadProduct,
    slots: torch.Tensor,
    kv: torch.Tensor,
    places: torch.Tensor,
    scale: torch.Tensor | None,
) -> torch.Tensor:
    """Norms and rope in place, k and v to ``places`` [T] of ``kv``; returns q [T, nq, d], a view.

    slots: [T], which rows are padding and write nothing.
    """
    qkv, num_heads, rope = product.qkv, product.num_heads, product.positions.rope
    rope_cache_write(
        qkv,
        num_heads,
        product.num_kv_heads,
        RopeTables(rope.cos, rope.sin),
        TokenRows(slots, product.positions.of_tokens),
        cache=CachePlaces(kv, places=places, kv_scale=scale),
        norms=_norms(product),
        pdl=qkv.shape[0] <= MAX_PDL_TOKENS,
    )
    return qkv[:, : num_heads * product.head_dim].view(qkv.shape[0], num_heads, product.head_dim)


def _norms(product: HeadProduct) -> HeadNorms | None:
    if product.norm is None:
        return None
    weight = product.norm.weight
    if weight.dim() == 1:  # of q alone, or of k alone
        return HeadNorms(weight, weight, product.norm.eps)
    return HeadNorms(weight[0], weight[product.num_heads], product.norm.eps)


def _part(product: HeadProduct, positions: Positions, rows: slice) -> HeadProduct:
    """Some tokens of a product."""
    return replace(product, qkv=product.qkv[rows], positions=positions)


class _DecodeLayers:
    """Rows of Q queries each by one plan for a window; or of fewer, ``lines`` [T] int64 being row * Q + query
    of each."""

    def __init__(
        self,
        backend: TritonAttention,
        plans: dict[int | None, DecodePlan],  # by window, of the same rows
        lines: torch.Tensor | None = None,
    ) -> None:
        self._backend = backend
        self._plans = plans
        plan = next(iter(plans.values()))
        # None: the attention's own launch turns and writes. Else [T] int64, which rows are padding.
        self._slots: torch.Tensor | None = None
        self._places = plan.places  # [T] int64, where K and V go
        if not can_turn(plan):
            queries, slots = plan.view.query_len, plan.slots
            if lines is None:
                self._slots = slots.repeat_interleave(queries, output_size=queries * slots.shape[0])
            else:
                self._slots, self._places = slots[lines // queries], plan.places[lines]

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, HeadProduct)
        return self.run(layer, product, None)

    def run(self, layer: int, product: HeadProduct, out: torch.Tensor | None) -> torch.Tensor:
        """out: [T, nq, d], made if not given."""
        backend, scope, plan = self._backend, product.scope, self._plans[product.scope.window]
        view = plan.view
        assert view.writes == (product.num_kv_heads > 0), "Block.NONE writes nothing, the others do"
        kv, scale = backend.pool.layer_kv(layer), backend.layer_scale(layer)
        scratch = backend.layer_scratch(layer) if view.scratch else None
        if self._slots is None:
            qkv, positions = product.qkv, product.positions
            tables = RopeTables(positions.rope.cos, positions.rope.sin)
            pdl = MIN_TURN_PDL_TOKENS <= qkv.shape[0] <= MAX_TURN_PDL_TOKENS
            turn = Turn(qkv, tables, positions.of_tokens, _norms(product), pdl)
            return decode_attention(None, kv, plan, scale, scratch, out, turn, scope.sinks)
        target = kv if scratch is None else scratch.flatten(0, 1)
        q = _turn(product, self._slots, target, self._places, scale)
        return decode_attention(q, kv, plan, scale, scratch, out, sinks=scope.sinks)


Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, Scope, torch.Tensor], torch.Tensor]
"""q [T, nq, d], a layer's pool, its scale, its scope, out [T, nq, d] -> out. The chunks' K and V are in the
pool."""


class PrefillLayers:
    """Chunks of any lengths by one plan, whoever attends."""

    def __init__(
        self,
        backend: TritonAttention,
        token_slots: torch.Tensor,  # [T] int64
        places: torch.Tensor,  # [T] int64: where K and V go
        attend: Attend,
    ) -> None:
        self._backend = backend
        self._token_slots = token_slots
        self._places = places
        self._attend = attend

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, HeadProduct)
        return self.run(layer, product, None)

    def run(self, layer: int, product: HeadProduct, out: torch.Tensor | None) -> torch.Tensor:
        """out: [T, nq, d], made if not given."""
        kv, scale = self._backend.pool.layer_kv(layer), self._backend.layer_scale(layer)
        q = _turn(product, self._token_slots, kv, self._places, scale)
        if out is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self._attend(q, kv, scale, product.scope, out)


class _MixedLayers:
    """Decode rows of one query first, then prefill chunks; both write into one output."""

    def __init__(self, decode: _DecodeLayers, prefill: PrefillLayers, num_decode: int) -> None:
        self._decode = decode
        self._prefill = prefill
        self._num_decode = num_decode
        self._positions: tuple[Positions, Positions] | None = None  # of the two parts, for all layers

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, HeadProduct)
        n, qkv = self._num_decode, product.qkv
        if self._positions is None:
            rope, of_tokens = product.positions.rope, product.positions.of_tokens
            # A copy begins at a multiple of 16 bytes whatever n is: the kernels are compiled for that.
            self._positions = Positions(rope, of_tokens[:n]), Positions(rope, of_tokens[n:].clone())
        out = qkv.new_empty(qkv.shape[0], product.num_heads, product.head_dim)
        self._decode.run(layer, _part(product, self._positions[0], slice(None, n)), out[:n])
        self._prefill.run(layer, _part(product, self._positions[1], slice(n, None)), out[n:])
        return out
