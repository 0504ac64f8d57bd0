"""Latent attention over sgl_kernel: Triton on CUDA, its references elsewhere (which is how a CPU tests it).

Decode and verify rows attend to the latents, whose lengths are read on the device, so a step has the same
launches whatever they are. Up to 32 tokens they are three between a layer's products: what takes the queries
to the latents (and turns, norms and writes), the attention, and what makes values; one more a step plans for
all layers. A prefill chunk makes keys and values of what it sees, a segment of places at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel.attention import DecodePlan, View, plan_decode
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention
from sgl_kernel.attention.mla.prefilling.op import (
    LatentPrefillPlan,
    LatentShape,
    latent_prefill,
    plan_latent_prefill,
)
from sgl_kernel.attention.mla.preparing.ops import (
    NewLatents,
    absorb_queries,
    latent_values,
    prepare_latents,
)
from sgl_kernel.linear.ops import InputNorm
from sgl_kernel.rope.ops import RopeTables, TokenRows
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
from sglang.srt.layers.attention.heads import Positions
from sglang.srt.layers.attention.mla import RawLatents
from sglang.srt.mem_cache.mla_pool import MLAKVPool
from sglang.srt.model_executor.step_plan import PAD_SLOT

MAX_PDL_TOKENS = 32
"""Up to so many tokens small launches overlap with the kernel ahead of them."""


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Of one rank's part of a model."""

    num_heads: int
    key_dim: int  # n
    rope_dim: int  # r
    value_dim: int  # v
    rank: int  # R


class TritonMLA:
    """``KernelAttention`` over one pool. ``page_table`` [slots, max_pages] int32 has another owner."""

    needs_exact_lens = False

    def __init__(
        self, pool: MLAKVPool, page_table: torch.Tensor, sizes: HeadSizes, pdl: bool = False
    ) -> None:
        self.pool = pool
        self.page_table = page_table
        self.page_size = pool.page_size
        latents = pool.latents
        self._shape = LatentShape(
            sizes.num_heads, sizes.key_dim, sizes.rope_dim, sizes.value_dim, sizes.rank, pool.page_size
        )
        self._workspace = LatentWorkspace(
            sizes.num_heads, sizes.rank, pool.page_size, latents.device, latents.element_size(), pdl=pdl
        )
        # Latents of tree drafts, [layers, rows, S, R + r]
        self._scratch = latents.new_empty((pool.num_layers, 0, 0, latents.shape[2]))
        self._outgrown: list[torch.Tensor] = []  # CUDA graphs may hold their addresses

    def reserve(self, max_rows: int, max_query_len: int, scratch_places: int = 0) -> None:
        """Allocate for steps of up to this size; needed before a CUDA graph is captured."""
        self._workspace.reserve(max_rows, max_query_len)
        if scratch_places:
            self._grow_scratch(max_rows, scratch_places)

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool places of (slot, position) pairs; same shape as its arguments, int64."""
        return pool_places(self.page_table, self.page_size, slots, positions)

    def write(self, layer: int, product: Product, rows: CacheRows) -> None:
        assert isinstance(product, RawLatents)
        new = NewLatents(
            product.down,
            InputNorm(product.norm.weight, product.norm.eps),
            self.pool.layer_latents(layer),
            page_table=self.page_table,
            page_size=self.page_size,
            pad_slot=PAD_SLOT,
        )
        of_rows = TokenRows(rows.slots, rows.root, rows.counts)
        tables = rope_tables(product)
        prepare_latents(None, None, new, tables, of_rows, interleaved=product.interleaved, pdl=rows.pdl)

    def decode(self, rows: DecodeRows) -> LayerAttention:
        return self._decode(rows)

    def prefill(self, rows: PrefillRows) -> LayerAttention:
        return self._prefill(rows)

    def mixed(self, decode: DecodeRows, prefill: PrefillRows) -> LayerAttention:
        assert decode.query_len == 1
        return _MixedLayers(self._decode(decode), self._prefill(prefill), decode.slots.shape[0])

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
        cap = self._scratch.shape[2]
        return _DecodeLayers(
            self, plan_decode(self._workspace, rows.slots, rows.base_len, self.page_table, view, cap)
        )

    def layer_scratch(self, layer: int) -> torch.Tensor:
        """[rows, S, R + r], a view."""
        return self._scratch[layer]

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
        return _DecodeLayers(
            self, plan_decode(self._workspace, rows.slots, rows.base_len, self.page_table, view)
        )

    def _prefill(self, rows: PrefillRows) -> LayerAttention:
        itemsize = self.pool.latents.element_size()
        plan = plan_latent_prefill(
            self._shape, self.page_table, rows.slots, rows.starts, rows.query_lens, itemsize
        )
        return _PrefillLayers(self, plan)

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


def rope_tables(product: RawLatents) -> RopeTables:
    rope = product.positions.rope
    return RopeTables(rope.cos, rope.sin)


def new_latents(product: RawLatents, latents: torch.Tensor, places: torch.Tensor) -> NewLatents | None:
    """latents: [places, R + r] of a layer; places: [T] int64. None: there is nothing to write."""
    if len(product.down) == 0:
        return None
    norm = InputNorm(product.norm.weight, product.norm.eps)
    return NewLatents(product.down, norm, latents, places=places, pad_slot=PAD_SLOT)


def overlaps(product: RawLatents) -> bool:
    """Whether small launches overlap with the kernel ahead of them."""
    return len(product.q) <= MAX_PDL_TOKENS


def token_slots(plan: DecodePlan) -> torch.Tensor:
    """[T] int64: a token of the pad slot is padding."""
    queries, slots = plan.view.query_len, plan.slots
    return slots if queries == 1 else slots.repeat_interleave(queries, output_size=queries * slots.shape[0])


def absorb_and_write(
    backend: TritonMLA, layer: int, product: RawLatents, plan: DecodePlan, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Decode rows' queries taken to the latents, [T, nq, R + r], and what is new written; and the layer's
    scratch places, if the plan has any. slots: ``token_slots(plan)``."""
    assert plan.view.writes == (len(product.down) > 0), "Block.NONE writes nothing, the others do"
    latents = backend.pool.layer_latents(layer)
    scratch = backend.layer_scratch(layer) if plan.view.scratch else None
    target = latents if scratch is None else scratch.flatten(0, 1)
    q = product.q
    queries = absorb_queries(
        q,
        product.heads.weight,
        q.new_empty(*q.shape[:2], latents.shape[1]),
        new_latents(product, target, plan.places),
        rope_tables(product),
        TokenRows(slots, product.positions.of_tokens),
        interleaved=product.interleaved,
        pdl=overlaps(product),
    )
    return queries, scratch


class _DecodeLayers:
    """Rows of Q queries each by one plan, which is good until the backend's next one."""

    def __init__(self, backend: TritonMLA, plan: DecodePlan) -> None:
        self._backend = backend
        self._plan = plan
        self._slots = token_slots(plan)

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, RawLatents) and not product.sparse, "these attend to all places"
        backend, plan, heads = self._backend, self._plan, product.heads
        queries, scratch = absorb_and_write(backend, layer, product, plan, self._slots)
        latents = backend.pool.layer_latents(layer)
        sums = latent_attention(queries, latents, plan, product.scale, scratch=scratch)
        return latent_values(sums, heads.weight[:, heads.key_dim :], pdl=overlaps(product))


class _PrefillLayers:
    """Chunks of any lengths by one plan."""

    def __init__(self, backend: TritonMLA, plan: LatentPrefillPlan) -> None:
        self._backend = backend
        self._plan = plan

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, RawLatents) and not product.sparse
        plan, q = self._plan, product.q
        latents = self._backend.pool.layer_latents(layer)
        prepare_latents(
            q,
            q,
            new_latents(product, latents, plan.places),
            rope_tables(product),
            TokenRows(plan.token_slots, product.positions.of_tokens),
            interleaved=product.interleaved,
        )
        return latent_prefill(q, latents, product.heads.weight, plan, product.scale)


class _MixedLayers:
    """Decode rows of one query first, then prefill chunks."""

    def __init__(self, decode: LayerAttention, prefill: LayerAttention, num_decode: int) -> None:
        self._decode = decode
        self._prefill = prefill
        self._num_decode = num_decode
        self._positions: tuple[Positions, Positions] | None = None  # of the two parts, for all layers

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, RawLatents)
        n = self._num_decode
        if self._positions is None:
            rope, of_tokens = product.positions.rope, product.positions.of_tokens
            # A copy begins at a multiple of 16 bytes whatever n is: the kernels are compiled for that.
            self._positions = Positions(rope, of_tokens[:n]), Positions(rope, of_tokens[n:].clone())
        first, rest = self._positions
        return torch.cat(
            (
                self._decode(layer, product.take(slice(None, n), first)),
                self._prefill(layer, product.take(slice(n, None), rest)),
            )
        )
