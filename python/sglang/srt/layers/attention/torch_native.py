"""Attention in plain PyTorch: the backend of CPUs, and the reference of the others.

All index arithmetic is done once a step (``rows.py``); a layer then gathers K and V of all its rows with
one call and attends with one call (decode, verify, draft; prefill takes its chunks one by one). Rows of
very different lengths are taken apart by length, for a row is padded to the longest one beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.srt.layers.attention.base import DecodeRows, LayerAttention, PrefillRows, Product, ScratchRows
from sglang.srt.layers.attention.heads import HeadProduct, Scope
from sglang.srt.layers.attention.rows import (
    ChunkPlaces,
    PagedRows,
    SeenPlaces,
    additive,
    last_seen,
    parts_by_length,
    put_right,
    width,
)
from sglang.srt.layers.attention.sinks import attend_with_sinks
from sglang.srt.mem_cache.kv_pool import MHAKVPool
from sglang.srt.mem_cache.pool import stored


class TorchNativeAttention:
    """``AttentionBackend`` over one pool. ``page_table`` [slots, max_pages] int32 has another owner."""

    needs_exact_lens = False

    def __init__(self, pool: MHAKVPool, page_table: torch.Tensor) -> None:
        self.pool = pool
        self.page_table = page_table
        self._rows = PagedRows(page_table, pool.page_size)
        # K and V of a step's rows, [places, nkv, 2, d]: one buffer for all layers and steps
        self._gathered = pool.kv.new_empty((0, *pool.kv.shape[2:]))
        # K and V of tree drafts, [layers, rows, S, nkv, 2, d]
        self._scratch = pool.kv.new_empty((pool.num_layers, 0, 0, *pool.kv.shape[2:]))

    def places(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Pool places of (slot, position) pairs; same shape as its arguments, int64."""
        return self._rows.places(slots, positions)

    def decode(self, rows: DecodeRows) -> LayerAttention:
        return _OfProducts(self._decode(rows))

    def prefill(self, rows: PrefillRows) -> LayerAttention:
        return _OfProducts(self._prefill(rows))

    def mixed(self, decode: DecodeRows, prefill: PrefillRows) -> LayerAttention:
        assert decode.query_len == 1
        layers = _MixedLayers(self._decode(decode), self._prefill(prefill), decode.slots.shape[0])
        return _OfProducts(layers)

    def scratch(self, rows: ScratchRows) -> LayerAttention:
        num_rows, num_queries, num_places = rows.scratch_mask.shape
        assert num_queries == rows.query_len and num_places == rows.write_start + num_queries
        self._grow_scratch(num_rows, num_places)
        columns = width(rows.base_len, rows.base_len_bound)
        index, seen = self._rows.base(rows.slots, rows.base_len, columns)
        base_mask = seen[:, None].expand(num_rows, num_queries, columns)
        mask = torch.cat((base_mask, rows.scratch_mask), dim=2)  # [R, Q, W + write_start + Q]
        return _OfProducts(_ScratchLayers(self, index, mask, rows.write_start))

    def _decode(self, rows: DecodeRows) -> OfHeads:
        parts = parts_by_length(rows)
        if not parts:
            return _DecodeLayers(self, self._rows.decode(rows))
        layers = [(tokens, _DecodeLayers(self, self._rows.decode(part))) for tokens, part in parts]
        return _PartedLayers(layers)

    def _prefill(self, rows: PrefillRows) -> _PrefillLayers:
        chunks: list[_Chunk] = []
        writes: list[torch.Tensor] = []
        for chunk in self._rows.prefill(rows):
            writes.append(chunk.places[chunk.start :])
            chunks.append(_Chunk(chunk))
        return _PrefillLayers(self.pool, chunks, torch.cat(writes))

    def gather(self, layer: int, index: torch.Tensor) -> torch.Tensor:
        """index: [R, W] places -> [R, W, nkv, 2, d] in the cache's type, valid until the next call."""
        size = index.numel()
        if self._gathered.shape[0] < size:
            self._gathered = self._gathered.new_empty((size + size // 4, *self._gathered.shape[1:]))
        out = self._gathered[:size]
        torch.index_select(self.pool.layer_kv(layer), 0, index.flatten(), out=out)
        return out.view(*index.shape, *out.shape[1:])

    def scratch_places(self, layer: int, num_rows: int, num_places: int) -> torch.Tensor:
        """[R, S, nkv, 2, d], a view."""
        return self._scratch[layer, :num_rows, :num_places]

    def _grow_scratch(self, num_rows: int, num_places: int) -> None:
        """Levels written before stay where they are."""
        layers, rows, places = self._scratch.shape[:3]
        if num_rows <= rows and num_places <= places:
            return
        grown = self._scratch.new_empty(
            (layers, max(num_rows, rows), max(num_places, places), *self._scratch.shape[3:])
        )
        grown[:, :rows, :places] = self._scratch
        self._scratch = grown


@dataclass(frozen=True, slots=True)
class Heads:
    """A product's heads, turned."""

    q: torch.Tensor  # [T, nq, d]
    k: torch.Tensor | None  # [T, nkv, d]; None: in the cache already
    v: torch.Tensor | None
    scope: Scope

    def of(self, tokens: torch.Tensor | slice) -> Heads:
        """Those of some tokens."""
        k, v = (None, None) if self.k is None or self.v is None else (self.k[tokens], self.v[tokens])
        return Heads(self.q[tokens], k, v, self.scope)

    def new(self) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.k is not None and self.v is not None
        return self.k, self.v


OfHeads = Callable[[int, Heads], torch.Tensor]
"""layer and its heads: writes k and v; -> [T, nq, d]."""


class _OfProducts:
    """``LayerAttention``: the heads are turned here, for all rows alike."""

    def __init__(self, layers: OfHeads) -> None:
        self._layers = layers

    def __call__(self, layer: int, product: Product) -> torch.Tensor:
        assert isinstance(product, HeadProduct)
        return self._layers(layer, Heads(*product.turned(), product.scope))


def _attend_rows(
    q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """q: [R, Q, nq, d]; kv: [R, W, nkv, 2, d]; mask: [R, 1, group * Q, W]; sinks: [nq] -> [R * Q, nq, d].

    The heads of a group become queries of their KV head, so that K and V need not be repeated.
    """
    num_rows, num_queries, num_heads, head_dim = q.shape
    nkv = kv.shape[2]
    group = num_heads // nkv
    # [R, Q, nkv, group, d] -> [R, nkv, group * Q, d]
    q = q.view(num_rows, num_queries, nkv, group, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(num_rows, nkv, group * num_queries, head_dim)
    k, v = kv.to(q.dtype).permute(3, 0, 2, 1, 4).unbind(0)  # [R, nkv, W, d] each, views
    if sinks is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    else:
        by_group = sinks.view(nkv, group, 1).expand(-1, -1, num_queries).reshape(nkv, -1)
        out = attend_with_sinks(q, k, v, mask, by_group)
    out = out.view(num_rows, nkv, group, num_queries, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(num_rows * num_queries, num_heads, head_dim)


def _group_mask(mask: torch.Tensor, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[R, Q, W] bool -> [R, 1, group * Q, W] additive."""
    num_rows, num_queries, columns = mask.shape
    by_group = additive(mask, dtype)[:, None].expand(num_rows, group, num_queries, columns)
    return by_group.reshape(num_rows, 1, group * num_queries, columns)


class _DecodeLayers:
    """Rows of Q queries each over gathered places."""

    def __init__(self, backend: TorchNativeAttention, places: SeenPlaces) -> None:
        self._backend = backend
        self._places = places
        # by window: what is seen [R, Q, W] bool, and the same as a mask [R, 1, group * Q, W]
        self._seen: dict[int | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def write(self, layer: int, heads: Heads) -> None:
        if self._places.write is None:
            assert heads.k is None and heads.v is None, "Block.NONE writes nothing"
            return
        self._backend.pool.write(layer, self._places.write, *heads.new())

    def attend(self, layer: int, q: torch.Tensor, scope: Scope) -> torch.Tensor:
        index, sinks = self._places.index, scope.sinks
        group = q.shape[1] // self._backend.pool.num_kv_heads
        seen, mask = self._masks(scope.window, group, q.dtype)
        kv = self._backend.gather(layer, index)
        out = _attend_rows(q.view(*seen.shape[:2], *q.shape[1:]), kv, mask, sinks)

        def singly(query: torch.Tensor, places: torch.Tensor, apart: torch.Tensor) -> torch.Tensor:
            own_mask = _group_mask(apart, group, q.dtype)
            return _attend_rows(q[query][:, None], self._backend.gather(layer, places), own_mask, sinks)

        put_right(out, index, seen, singly)
        return out

    def _masks(self, window: int | None, group: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        if window not in self._seen:
            seen = self._places.seen if window is None else last_seen(self._places.seen, window)
            self._seen[window] = seen, _group_mask(seen, group, dtype)
        return self._seen[window]

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        self.write(layer, heads)
        return self.attend(layer, heads.q, heads.scope)


class _PartedLayers:
    """Groups of rows, one after the other. No row reads what another one writes in the same step."""

    def __init__(self, parts: list[tuple[torch.Tensor, _DecodeLayers]]) -> None:
        self._parts = parts  # query tokens [T'] int64 of a group, and its attention

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        out = torch.empty_like(heads.q)
        for tokens, part in self._parts:
            out[tokens] = part(layer, heads.of(tokens))
        return out


class _Chunk:
    """One prefill chunk, and its masks as they are asked for."""

    def __init__(self, places: ChunkPlaces) -> None:
        self.length = places.length
        self.prefix = places.places[: places.start] if places.start else None  # [start] int64 places
        self._places = places
        self._masks: dict[int | None, torch.Tensor] = {}  # by window

    def mask(self, scope: Scope, dtype: torch.dtype) -> torch.Tensor | None:
        """[length, start + length], added to the scores; None: the chunk is causal in itself."""
        window = scope.window
        if window is not None and window >= len(self._places.places):
            window = None
        if self.prefix is None and window is None and scope.sinks is None:
            return None
        if window not in self._masks:
            seen = self._places.seen()
            seen = seen if window is None else last_seen(seen, window)
            self._masks[window] = additive(seen, dtype)
        return self._masks[window]


class _PrefillLayers:
    """Chunks one after the other; what a chunk brings itself is not gathered back from the pool."""

    def __init__(self, pool: MHAKVPool, chunks: list[_Chunk], write: torch.Tensor) -> None:
        self._pool = pool
        self._chunks = chunks
        self._write = write  # [T] int64 places

    def attend(self, layer: int, heads: Heads) -> torch.Tensor:
        out = torch.empty_like(heads.q)
        begin = 0
        for chunk in self._chunks:
            end = begin + chunk.length
            out[begin:end] = self._attend_chunk(layer, chunk, heads.of(slice(begin, end)))
            begin = end
        return out

    def _attend_chunk(self, layer: int, chunk: _Chunk, heads: Heads) -> torch.Tensor:
        q, (k, v), sinks = heads.q, heads.new(), heads.scope.sinks
        # As they will be read later on, so that it makes no difference who brings a token.
        dtype = self._pool.kv.dtype
        k, v = stored(k, dtype).to(q.dtype), stored(v, dtype).to(q.dtype)
        if chunk.prefix is not None:
            prefix = (
                self._pool.layer_kv(layer).index_select(0, chunk.prefix).to(q.dtype)
            )  # [start, nkv, 2, d]
            k, v = torch.cat((prefix[:, :, 0], k)), torch.cat((prefix[:, :, 1], v))
        # KV heads as the batch, their group as the heads: K and V are repeated by a stride of 0
        length, num_heads, head_dim = q.shape
        nkv = k.shape[1]
        group = num_heads // nkv
        q = q.view(length, nkv, group, head_dim).permute(1, 2, 0, 3)  # [nkv, group, length, d]
        k, v = k.transpose(0, 1)[:, None], v.transpose(0, 1)[:, None]  # [nkv, 1, start + length, d]
        mask = chunk.mask(heads.scope, q.dtype)
        if sinks is None:
            k, v = k.expand(nkv, group, -1, head_dim), v.expand(nkv, group, -1, head_dim)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        else:
            assert mask is not None
            out = attend_with_sinks(q, k, v, mask, sinks.view(nkv, group, 1).expand(-1, -1, length))
        return out.permute(2, 0, 1, 3).reshape(length, num_heads, head_dim)

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        self._pool.write(layer, self._write, *heads.new())
        return self.attend(layer, heads)


class _MixedLayers:
    """Decode rows of one query first, then prefill chunks."""

    def __init__(self, decode: OfHeads, prefill: _PrefillLayers, num_decode: int) -> None:
        self._decode = decode
        self._prefill = prefill
        self._num_decode = num_decode

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        n = self._num_decode
        decoded = self._decode(layer, heads.of(slice(None, n)))
        return torch.cat((decoded, self._prefill(layer, heads.of(slice(n, None)))))


class _ScratchLayers:
    """A level of a draft tree: pool places of the row, then the scratch places written so far."""

    def __init__(
        self,
        backend: TorchNativeAttention,
        index: torch.Tensor,  # [R, W] int64 places
        seen: torch.Tensor,  # [R, Q, W + S] bool
        write_start: int,
    ) -> None:
        self._backend = backend
        self._index = index
        self._seen = seen
        self._write_start = write_start

    def __call__(self, layer: int, heads: Heads) -> torch.Tensor:
        q, (k, v), scope = heads.q, heads.new(), heads.scope
        num_rows, num_queries, _ = self._seen.shape
        scratch = self._backend.scratch_places(layer, num_rows, self._write_start + num_queries)
        new = stored(torch.stack((k, v), dim=2), scratch.dtype)  # [T, nkv, 2, d]
        scratch[:, self._write_start :] = new.view(num_rows, num_queries, *new.shape[1:])
        kv = torch.cat((self._backend.gather(layer, self._index), scratch), dim=1)
        seen = self._seen if scope.window is None else last_seen(self._seen, scope.window)
        mask = _group_mask(seen, q.shape[1] // kv.shape[2], q.dtype)
        return _attend_rows(q.view(num_rows, num_queries, *q.shape[1:]), kv, mask, scope.sinks)
