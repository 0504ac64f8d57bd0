"""Latent attention in plain PyTorch: the backend of CPUs, and the reference of kernels.

Decode rows (plain, or verifying drafts) attend to the latents themselves; a prefill chunk, whose queries
are many, makes keys and values of what it sees. The two differ by rounding alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base import DecodeRows, LayerAttention, PrefillRows, Product, ScratchRows
from sglang.srt.layers.attention.mla import IndexProduct, LatentProduct, RawLatents
from sglang.srt.layers.attention.mla_sparse import best_places, index_scores
from sglang.srt.layers.attention.rows import (
    ChunkPlaces,
    PagedRows,
    SeenPlaces,
    additive,
    parts_by_length,
    put_right,
    width,
)
from sglang.srt.mem_cache.mla_pool import MLAKVPool
from sglang.srt.mem_cache.pool import stored


class TorchNativeMLA:
    """``AttentionBackend`` over one pool. ``page_table`` [slots, max_pages] int32 has another owner."""

    needs_exact_lens = False

    def __init__(self, pool: MLAKVPool, page_table: torch.Tensor) -> None:
        self.pool = pool
        self._rows = PagedRows(page_table, pool.page_size)
        # What tree drafts leave, [layers, rows, S, …] each, as the pool's tensors
        self._scratch = [t.new_empty((t.shape[0], 0, 0, *t.shape[2:])) for t in pool.tensors]

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool places of (slot, position) pairs; same shape as its arguments, int64."""
        return self._rows.places(slots, positions)

    def decode(self, rows: DecodeRows) -> LayerAttention:
        return _OfLatents(self._decode(rows))

    def prefill(self, rows: PrefillRows) -> LayerAttention:
        return _OfLatents(self._prefill(rows))

    def mixed(self, decode: DecodeRows, prefill: PrefillRows) -> LayerAttention:
        assert decode.query_len == 1
        num_decode = decode.slots.shape[0]
        first, rest = slice(None, num_decode), slice(num_decode, None)
        return _OfLatents(_PartedLayers([(first, self._decode(decode)), (rest, self._prefill(prefill))]))

    def scratch(self, rows: ScratchRows) -> LayerAttention:
        num_rows, num_queries, num_places = rows.scratch_mask.shape
        assert num_queries == rows.query_len and num_places == rows.write_start + num_queries
        self._grow_scratch(num_rows, num_places)
        columns = width(rows.base_len, rows.base_len_bound)
        index, seen = self._rows.base(rows.slots, rows.base_len, columns)
        of_base = seen[:, None].expand(num_rows, num_queries, columns)
        seen = torch.cat((of_base, rows.scratch_mask), dim=2)  # [R, Q, W + write_start + Q]
        own = [tensor[:, :num_rows, :num_places] for tensor in self._scratch]
        return _OfLatents(_ScratchLayers(self.pool, own, index, seen, rows.write_start))

    def _grow_scratch(self, num_rows: int, num_places: int) -> None:
        """Levels written before stay where they are."""
        for i, old in enumerate(self._scratch):
            layers, rows, places = old.shape[:3]
            if num_rows > rows or num_places > places:
                more = (layers, max(num_rows, rows), max(num_places, places), *old.shape[3:])
                self._scratch[i] = old.new_empty(more)
                self._scratch[i][:, :rows, :places] = old

    def _decode(self, rows: DecodeRows) -> Layers:
        parts = parts_by_length(rows)
        if not parts:
            return _DecodeLayers(self.pool, self._rows.decode(rows))
        layers = [(tokens, _DecodeLayers(self.pool, self._rows.decode(part))) for tokens, part in parts]
        return _PartedLayers(layers)

    def _prefill(self, rows: PrefillRows) -> Layers:
        return _PrefillLayers(self.pool, self._rows.prefill(rows))


Layers = Callable[[int, LatentProduct], torch.Tensor]
"""layer, the product of T tokens -> [T, nq, v]."""


class _OfLatents:
    """``LayerAttention``"""

    def __init__(self, layers: Layers) -> None:
        self._layers = layers

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        if isinstance(product, RawLatents):
            product = product.made()
        assert isinstance(product, LatentProduct)
        return self._layers(layer, product)


class _PartedLayers:
    """Groups of rows, one after the other. No row reads what another one writes in the same step."""

    def __init__(self, parts: Sequence[tuple[torch.Tensor | slice, Layers]]) -> None:
        self._parts = parts  # query tokens ([T'] int64) of a group, and its attention

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        num_tokens, num_heads, _ = product.q_nope.shape
        out = product.q_nope.new_empty(num_tokens, num_heads, product.heads.value_dim)
        for tokens, part in self._parts:
            out[tokens] = part(layer, product.take(tokens))
        return out


def _write(pool: MLAKVPool, layer: int, places: torch.Tensor, product: LatentProduct) -> None:
    """places: [T] int64."""
    pool.write(layer, places, product.latent)
    if product.index is not None:
        pool.write_index_keys(layer, places, product.index.k)


class _DecodeLayers:
    """Rows of Q queries each over gathered latents."""

    def __init__(self, pool: MLAKVPool, places: SeenPlaces) -> None:
        self._pool = pool
        self._places = places
        self._chosen: torch.Tensor | None = None  # [R, Q, W] bool, by the last layer with an indexer

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        if self._places.write is not None:
            _write(self._pool, layer, self._places.write, product)
        index, seen = self._places.index, self._seen(layer, product)
        latents, latent_dim = self._pool.layer_latents(layer), product.heads.latent_dim
        num_rows, num_queries, _ = seen.shape
        q = product.absorbed()  # [T, nq, R + r]
        of_rows = q.view(num_rows, num_queries, *q.shape[1:])
        out = _attend_latents(of_rows, latents[index].to(q.dtype), seen, product.scale, latent_dim)

        def singly(query: torch.Tensor, places: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
            return _attend_latents(
                q[query][:, None], latents[places].to(q.dtype), apart, product.scale, latent_dim
            )

        put_right(out, index, seen, singly)
        return product.heads.values(out)

    def _seen(self, layer: int, product: LatentProduct) -> torch.Tensor:
        """[R, Q, W] bool: all that is visible, or what was chosen of it."""
        if not product.sparse:
            return self._places.seen
        if product.index is not None:
            num_rows, num_queries, _ = self._places.seen.shape
            keys = self._pool.layer_index_keys(layer)[self._places.index]  # [R, W, d]
            by_row = (num_rows, num_queries)
            self._chosen = _choose(product.index, by_row, keys, self._places.seen)
        assert self._chosen is not None, f"layer {layer} has no indexer, nor had one before it"
        return self._chosen


class _ScratchLayers:
    """A level of a draft tree: pool places of the row, then the scratch places written so far."""

    def __init__(
        self,
        pool: MLAKVPool,
        scratch: list[torch.Tensor],  # [layers, R, S, …]: latents, and an indexer's keys where there are some
        index: torch.Tensor,  # [R, W] int64 places
        seen: torch.Tensor,  # [R, Q, W + S] bool
        write_start: int,
    ) -> None:
        self._pool = pool
        self._scratch = scratch
        self._index = index
        self._seen = seen
        self._write_start = write_start

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        num_rows, num_queries, _ = self._seen.shape
        latents = self._joined(self._scratch[0][layer], product.latent, self._pool.layer_latents(layer))
        seen = self._seen
        if product.sparse:
            assert product.index is not None and self._pool.num_layers == 1, "only a drafter of one layer"
            of_pool = self._pool.layer_index_keys(layer)
            keys = self._joined(self._scratch[1][layer], product.index.k, of_pool)
            seen = _choose(product.index, (num_rows, num_queries), keys, seen)
        q = product.absorbed()  # [T, nq, R + r]
        of_rows = q.view(num_rows, num_queries, *q.shape[1:])
        return product.heads.values(
            _attend_latents(of_rows, latents, seen, product.scale, product.heads.latent_dim)
        )

    def _joined(self, scratch: torch.Tensor, new: torch.Tensor, of_pool: torch.Tensor) -> torch.Tensor:
        """Write ``new`` [T, d] to ``scratch`` [R, S, d] -> [R, W + S, d], all that the rows may see."""
        new = new.view(len(scratch), -1, new.shape[-1])
        scratch[:, self._write_start :] = stored(new, scratch.dtype)
        return torch.cat((of_pool[self._index], scratch), dim=1).to(new.dtype)


class _PrefillLayers:
    """Chunks one after the other; what a chunk brings itself is not gathered back from the pool."""

    def __init__(self, pool: MLAKVPool, chunks: list[ChunkPlaces]) -> None:
        self._pool = pool
        self._chunks = chunks
        self._write = torch.cat([chunk.places[chunk.start :] for chunk in chunks])  # [T] int64
        self._seen = [chunk.seen() for chunk in chunks]  # [length, start + length] bool each
        self._chosen = self._seen  # by the last layer with an indexer
        self._masks: list[torch.Tensor] = []  # additive, of ``_seen``

    def __call__(self, layer: int, product: LatentProduct) -> torch.Tensor:
        _write(self._pool, layer, self._write, product)
        parts = self._by_chunk(product)
        masks = self._masks_of(layer, product, parts)
        keep = zip(self._chunks, parts, masks, strict=True)
        return torch.cat([self._attend(layer, chunk, part, mask) for chunk, part, mask in keep])

    def _by_chunk(self, product: LatentProduct) -> list[LatentProduct]:
        begins = [0]
        for chunk in self._chunks:
            begins.append(begins[-1] + chunk.length)
        return [product.take(slice(a, b)) for a, b in zip(begins[:-1], begins[1:], strict=True)]

    def _masks_of(self, layer: int, product: LatentProduct, parts: list[LatentProduct]) -> list[torch.Tensor]:
        """[length, start + length] additive, for each chunk."""
        dtype = product.latent.dtype
        if not product.sparse:
            if not self._masks:
                self._masks = [additive(seen, dtype) for seen in self._seen]
            return self._masks
        if product.index is not None:
            keep = zip(self._chunks, parts, self._seen, strict=True)
            self._chosen = [self._choose(layer, chunk, part.index, seen) for chunk, part, seen in keep]
        return [additive(chosen, dtype) for chosen in self._chosen]

    def _choose(
        self, layer: int, chunk: ChunkPlaces, index: IndexProduct | None, seen: torch.Tensor
    ) -> torch.Tensor:
        """[length, start + length] bool."""
        assert index is not None
        prefix = self._pool.layer_index_keys(layer)[chunk.places[: chunk.start]]
        keys = torch.cat((prefix, index.k))  # [start + length, d]
        return _choose(index, (1, chunk.length), keys[None], seen[None])[0]

    def _attend(
        self, layer: int, chunk: ChunkPlaces, part: LatentProduct, mask: torch.Tensor
    ) -> torch.Tensor:
        of_pool, dtype = self._pool.layer_latents(layer), part.latent.dtype
        prefix = of_pool[chunk.places[: chunk.start]].to(dtype)
        # As it will be read later on, so that it makes no difference who brings a token.
        own = stored(part.latent, of_pool.dtype).to(dtype)
        latents, k_rope = torch.cat((prefix, own)).split(
            (part.heads.latent_dim, part.q_rope.shape[-1]), dim=-1
        )
        k_nope, v = part.heads.expand(latents)  # [S, nq, n], [S, nq, v]
        k_rope = k_rope[:, None].expand(-1, k_nope.shape[1], -1)
        q = torch.cat((part.q_nope, part.q_rope), dim=-1).transpose(0, 1)  # [nq, length, n + r]
        k = torch.cat((k_nope, k_rope), dim=-1).transpose(0, 1)
        # The fused kernel of CPUs wants keys and values of one size; 0 adds nothing to a value.
        wide = max(k.shape[-1], v.shape[-1])
        q, k, padded = (
            F.pad(x, (0, wide - x.shape[-1]))[None] for x in (q, k, v.transpose(0, 1))
        )  # [1, nq, …, wide]
        out = F.scaled_dot_product_attention(q, k, padded, attn_mask=mask, scale=part.scale)[0]
        return out[..., : v.shape[-1]].transpose(0, 1)


def _choose(
    index: IndexProduct, by_row: tuple[int, int], keys: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """by_row: R, Q; keys: [R, W, d]; seen: [R, Q, W] bool -> [R, Q, W] bool."""
    if seen.shape[-1] <= index.top_k:
        return seen
    q, weights = index.q.view(*by_row, *index.q.shape[1:]), index.weights.view(*by_row, -1)
    return best_places(index_scores(q, keys, weights), seen, index.top_k)


def _attend_latents(
    q: torch.Tensor,  # [R, Q, nq, R' + r]
    latents: torch.Tensor,  # [R, W, R' + r]
    seen: torch.Tensor,  # [R, Q, W] bool
    scale: float,
    latent_dim: int,  # R'
) -> torch.Tensor:
    """[R * Q, nq, R']: sums of the latents, weighted as one key head that all query heads share says."""
    num_rows, num_queries, num_heads, _ = q.shape
    scores = (q.flatten(1, 2) * scale) @ latents.transpose(1, 2)  # [R, Q * nq, W]
    by_query = scores.view(num_rows, num_queries, num_heads, -1)
    by_query.masked_fill_(~seen[:, :, None], float("-inf"))
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    out = weights.to(latents.dtype) @ latents[..., :latent_dim]
    return out.view(num_rows * num_queries, num_heads, latent_dim)
