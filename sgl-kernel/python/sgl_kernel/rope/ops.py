"""Rotary embedding of q and k, and the write of k and v to the paged cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


@dataclass(frozen=True, slots=True)
class RopeTables:
    """Tables of ``srt/layers/rope.py``: half-split pairs, dimension i goes with i + d / 2."""

    cos: torch.Tensor  # [positions, d] float32, both halves the same
    sin: torch.Tensor  # [positions, d] float32, the first half negated


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norm of each head before it is turned (Qwen3)."""

    q_weight: torch.Tensor  # [d]
    k_weight: torch.Tensor  # [d]
    eps: float


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Where T = R * Q tokens belong: Q queries of each of R rows, or with Q = 1 any tokens at all."""

    slots: torch.Tensor  # [R] integer
    root: torch.Tensor  # [R] integer position of a row's first query
    counts: torch.Tensor | None = None  # [R] integer queries whose k and v are wanted; None: all

    def num_queries(self, num_tokens: int) -> int:
        return num_tokens // self.slots.shape[0]


@dataclass(frozen=True, slots=True)
class CachePlaces:
    """One layer of a paged cache, and where in it the tokens go: looked up, or given as ``places``."""

    kv: torch.Tensor  # [places, nkv, 2, d] contiguous; bfloat16, float16, float32 or float8_e4m3fn
    page_table: torch.Tensor | None = None  # [slots, max_pages] int32
    page_size: int = 1  # tokens
    places: torch.Tensor | None = None  # [T] int64, also of a scratch pool
    kv_scale: torch.Tensor | None = None  # [nkv, 2] float32, by which k and v are divided
    pad_slot: int = 0  # writes nothing


def rope_cache_write(
    qkv: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    tables: RopeTables,
    rows: TokenRows,
    *,
    cache: CachePlaces | None = None,
    norms: HeadNorms | None = None,
    q_out: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Turn q and k by their positions; q goes to ``q_out`` (None: its place in qkv), k and v to the cache.

    qkv: [T, (nq + 2 * nkv) * d], q heads, then k, then v. Query j of row r has position ``root[r] + j``,
    and is stored there unless ``cache`` names its place. Nothing is written for queries from ``counts`` on
    and for the pad slot. ``num_kv_heads`` 0: q alone (a draft forward whose k and v are in the cache);
    ``num_q_heads`` 0: k and v alone (a draft sync). Beyond the range of a float8 cache its largest value is
    stored. A head whose value is not finite gets a value of 0 and a key of NaN: whoever sees the place has
    a score of NaN as before, and whoever must not see it masks the key, which masks a value never can.
    """
    if qkv.shape[0] == 0:
        return
    if num_q_heads and q_out is None:
        q_out = qkv[:, : num_q_heads * tables.cos.shape[1]]
    if use_kernel(qkv):
        rope_launch(qkv, num_q_heads, num_kv_heads, tables, rows, cache, norms, q_out, pdl=pdl).run()
    else:
        rope_cache_write_ref(qkv, num_q_heads, num_kv_heads, tables, rows, cache, norms, q_out)


def rope_cache_write_ref(
    qkv: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    tables: RopeTables,
    rows: TokenRows,
    cache: CachePlaces | None,
    norms: HeadNorms | None,
    q_out: torch.Tensor | None,
) -> None:
    num_tokens, head_dim = qkv.shape[0], tables.cos.shape[1]
    num_queries, turning = rows.num_queries(num_tokens), num_q_heads + num_kv_heads
    heads = qkv.view(num_tokens, turning + num_kv_heads, head_dim)
    query = torch.arange(num_queries, device=qkv.device)
    stored = rows.root.to(torch.int64)[:, None] + query  # [R, Q]
    qk = heads[:, :turning]
    if norms is not None:
        qk = _head_normed(qk, num_q_heads, norms)
    cos, sin = (table[stored.reshape(-1)][:, None] for table in (tables.cos, tables.sin))
    qk = (qk.float() * cos + qk.float().roll(head_dim // 2, dims=-1) * sin).to(qkv.dtype)
    if num_kv_heads:
        assert cache is not None
        written = (rows.slots != cache.pad_slot)[:, None].expand_as(stored)
        if rows.counts is not None:
            written = written & (query < rows.counts[:, None])
        k, v = qk[:, num_q_heads:], heads[:, turning:]
        chosen = written.reshape(-1)
        places = _places(cache, rows, stored)
        cache.kv[places[chosen]] = _stored(k, v, cache)[chosen]
    if q_out is not None:
        q_out.copy_(qk[:, :num_q_heads].reshape(q_out.shape))


def rope_launch(
    qkv: torch.Tensor,
    num_q_heads: int,
    num_kv_heads: int,
    tables: RopeTables,
    rows: TokenRows,
    cache: CachePlaces | None,
    norms: HeadNorms | None,
    q_out: torch.Tensor | None,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.rope.kernels import rope_cache_write_kernel

    num_tokens, head_dim = qkv.shape[0], tables.cos.shape[1]
    num_heads = num_q_heads + 2 * num_kv_heads
    assert qkv.shape[1] == num_heads * head_dim and qkv.stride(1) == 1
    assert head_dim % 2 == 0 and tables.cos.is_contiguous() and tables.sin.is_contiguous()
    assert rows.slots.shape[0] * rows.num_queries(num_tokens) == num_tokens
    half = next_power_of_2(head_dim // 2)
    block_heads = max(1, 512 // half)
    blocks = -(-num_q_heads // block_heads) + -(-num_kv_heads // block_heads)
    q_target = qkv if q_out is None else q_out
    assert q_target.stride(1) == 1
    cache = CachePlaces(qkv) if cache is None else cache  # an address nothing is written to
    if num_kv_heads:
        assert cache.kv.shape[1:] == (num_kv_heads, 2, head_dim) and cache.kv.is_contiguous()
        assert (cache.page_table is None) != (cache.places is None), "one way to find a place"
    table = rows.slots[:, None] if cache.page_table is None else cache.page_table
    pdl = pdl and device_info(qkv.device).has_pdl
    return Launch(
        rope_cache_write_kernel,
        (num_tokens, blocks),
        (
            qkv,
            q_target,
            cache.kv,
            tables.cos if cache.kv_scale is None else cache.kv_scale,
            tables.cos,
            tables.sin,
            tables.cos if norms is None else norms.q_weight,
            tables.cos if norms is None else norms.k_weight,
            rows.slots,
            rows.root,
            rows.slots if rows.counts is None else rows.counts,
            table,
            rows.slots if cache.places is None else cache.places,
            qkv.stride(0),
            q_target.stride(0),
            table.stride(0),
            cache.pad_slot,
            0.0 if norms is None else norms.eps,
        ),
        {
            "QUERIES": rows.num_queries(num_tokens),
            "NQ": num_q_heads,
            "NKV": num_kv_heads,
            "D": head_dim,
            "HEADS": block_heads,
            "HALF": half,
            "PAGE_SIZE": cache.page_size,
            "FP8": cache.kv.dtype == torch.float8_e4m3fn,
            "SCALED": cache.kv_scale is not None,
            "PLACES": cache.places is not None,
            "HAS_COUNTS": rows.counts is not None,
            "NORM": norms is not None,
            "PDL": pdl,
        },
        num_warps=2,
        pdl=pdl,
    )


def _places(cache: CachePlaces, rows: TokenRows, stored: torch.Tensor) -> torch.Tensor:
    """[T] int64. stored: [R, Q] positions."""
    if cache.places is not None:
        return cache.places
    assert cache.page_table is not None
    pages = cache.page_table[rows.slots.to(torch.int64)[:, None], stored // cache.page_size]
    return (pages.to(torch.int64) * cache.page_size + stored % cache.page_size).reshape(-1)


def _stored(k: torch.Tensor, v: torch.Tensor, cache: CachePlaces) -> torch.Tensor:
    """[T, nkv, 2, d] in the cache's type."""
    k, v = k.float(), v.float()
    if cache.kv_scale is not None:
        k, v = k / cache.kv_scale[:, :1], v / cache.kv_scale[:, 1:]
    broken = ~v.isfinite().all(dim=2, keepdim=True)
    both = torch.stack((k.masked_fill(broken, torch.nan), v.masked_fill(broken, 0)), dim=2)
    if cache.kv.dtype == torch.float8_e4m3fn:
        both = both.clamp(-448, 448)
    return both.to(cache.kv.dtype)


def _head_normed(qk: torch.Tensor, num_q_heads: int, norms: HeadNorms) -> torch.Tensor:
    num_k_heads = qk.shape[1] - num_q_heads
    weight = torch.cat((norms.q_weight.expand(num_q_heads, -1), norms.k_weight.expand(num_k_heads, -1)))
    return F.rms_norm(qk.float(), (qk.shape[-1],), None, norms.eps).to(qk.dtype) * weight
