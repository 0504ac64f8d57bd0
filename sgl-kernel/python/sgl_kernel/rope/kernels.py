"""Rotary embedding and the write of K and V to the paged cache, in one kernel.

A program takes one token and a block of its q heads, or of its kv heads, of which it takes k and v.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def _load_halves(source, inside, D: tl.constexpr):
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    return low, tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _normed(low, high, weight, half, valid, eps, D: tl.constexpr, DT: tl.constexpr):
    """Each head's RMS norm over both halves, rounded as the norm's own kernel rounds."""
    scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / D + eps)[:, None]
    w_low, w_high = _load_halves(weight + half, valid, D)
    low = ((low * scale).to(DT).to(tl.float32) * w_low).to(DT).to(tl.float32)
    return low, ((high * scale).to(DT).to(tl.float32) * w_high).to(DT).to(tl.float32)


@triton.jit
def _turned(low, high, tables, DT: tl.constexpr):
    """Rounded to the type of the product that q and k come from.

    Which product is rounded by itself is said, not left to the compiler: decode attention turns its rows
    in another layout (``attention.decode.turning.kernels``), and both give the same bits.
    """
    c, s = tables
    return tl.fma(low, c, -(high * s)).to(DT), tl.fma(high, c, low * s).to(DT)


@triton.jit
def _store_cached(target, value, inside, FP8: tl.constexpr):
    if FP8:
        # e4m3 has no infinity: what is too large becomes 448. The comparisons let NaN through.
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _store_kv(
    target, k_low, k_high, v_low, v_high, head, inside, kv_scale,
    D: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """A head whose value is not finite gets a value of 0 and a key of NaN.

    A masked value is multiplied by 0, which does not silence NaN: so the key carries the fault.
    """
    if SCALED:
        of_k = tl.load(kv_scale + head * 2, mask=inside, other=1.0)
        of_v = tl.load(kv_scale + head * 2 + 1, mask=inside, other=1.0)
        k_low, k_high, v_low, v_high = k_low / of_k, k_high / of_k, v_low / of_v, v_high / of_v
    finite = ((v_low - v_low) == 0.0) & ((v_high - v_high) == 0.0)
    broken = (tl.min(finite.to(tl.int32), 1) == 0)[:, None]
    _store_cached(target, tl.where(broken, float("nan"), k_low), inside, FP8)
    _store_cached(target + D // 2, tl.where(broken, float("nan"), k_high), inside, FP8)
    _store_cached(target + D, tl.where(broken, 0.0, v_low), inside, FP8)
    _store_cached(target + D + D // 2, tl.where(broken, 0.0, v_high), inside, FP8)


@triton.jit
def _place(
    places, page_table, token, slot, stored, table_stride, PLACES: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    if PLACES:
        place = tl.load(places + token).to(tl.int64)
    else:
        page = tl.load(page_table + slot * table_stride + stored // PAGE_SIZE).to(tl.int64)
        place = page * PAGE_SIZE + stored % PAGE_SIZE
    return place


@triton.jit
def rope_cache_write_kernel(
    qkv,  # [T, (NQ + 2 * NKV) * D]
    q_out,  # [T, NQ * D]; may be the q part of qkv
    kv,  # [places, NKV, 2, D] one layer of the cache
    kv_scale,  # [NKV, 2] float32 if SCALED
    cos,  # [positions, D] float32, both halves the same
    sin,  # [positions, D] float32, first half negated
    q_weight,  # [D] if NORM
    k_weight,  # [D] if NORM
    slots,  # [R]
    root,  # [R] position of each row's first query
    counts,  # [R] if HAS_COUNTS
    page_table,  # [slots, max_pages] int32
    places,  # [T] if PLACES
    qkv_stride,
    q_stride,
    table_stride,
    pad_slot,
    eps,
    QUERIES: tl.constexpr,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,  # of a block
    HALF: tl.constexpr,  # D / 2 or the next power of two
    PAGE_SIZE: tl.constexpr,
    FP8: tl.constexpr,
    SCALED: tl.constexpr,
    PLACES: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    row, query = token // QUERIES, token % QUERIES
    half = tl.arange(0, HALF)[None, :]
    valid = half < D // 2
    start = tl.load(root + row).to(tl.int64)
    position = start + query
    # Both halves of cos are the same; the second half of sin is the positive one.
    c = tl.load(cos + position * D + half, mask=valid, other=0.0)
    s = tl.load(sin + position * D + D // 2 + half, mask=valid, other=0.0)
    DT: tl.constexpr = qkv.dtype.element_ty
    Q_BLOCKS: tl.constexpr = (NQ + HEADS - 1) // HEADS
    if block < Q_BLOCKS:
        q_head = block * HEADS + tl.arange(0, HEADS)[:, None]
        q_inside = (q_head < NQ) & valid
        q_low, q_high = _load_halves(qkv + token * qkv_stride + q_head * D + half, q_inside, D)
        if NORM:
            q_low, q_high = _normed(q_low, q_high, q_weight, half, valid, eps, D, DT)
        new_low, new_high = _turned(q_low, q_high, (c, s), DT)
        q_target = q_out + token * q_stride + q_head * D + half
        tl.store(q_target, new_low, mask=q_inside)
        tl.store(q_target + D // 2, new_high, mask=q_inside)
    elif NKV > 0:
        head = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < NKV) & valid
        source = qkv + token * qkv_stride + (NQ + head) * D + half
        k_low, k_high = _load_halves(source, inside, D)
        v_low, v_high = _load_halves(source + NKV * D, inside, D)
        if NORM:
            k_low, k_high = _normed(k_low, k_high, k_weight, half, valid, eps, D, DT)
        t_low, t_high = _turned(k_low, k_high, (c, s), DT)
        slot = tl.load(slots + row).to(tl.int64)
        written = slot != pad_slot
        if HAS_COUNTS:
            written = written & (query < tl.load(counts + row))
        place = _place(places, page_table, token, slot, position, table_stride, PLACES, PAGE_SIZE)
        target = kv + place * (NKV * 2 * D) + head * (2 * D) + half
        k_low, k_high = t_low.to(tl.float32), t_high.to(tl.float32)
        _store_kv(target, k_low, k_high, v_low, v_high, head, inside & written, kv_scale, D, SCALED, FP8)
