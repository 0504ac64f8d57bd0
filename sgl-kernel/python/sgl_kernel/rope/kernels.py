"""Rotary embedding and the write of K and V to the paged cache, in one kernel.

A program takes one token and a block of its heads, q, k and v alike: what differs between them is
whether they turn and where they go.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def _normed(low, high, head, weight_q, weight_k, half, valid, eps, NQ: tl.constexpr, D: tl.constexpr, DT):
    """Each head's RMS norm over both halves, rounded as the norm's own kernel rounds."""
    square = tl.sum(low * low, 1) + tl.sum(high * high, 1)
    scale = tl.rsqrt(square / D + eps)[:, None]
    of_q = head < NQ
    w_low = tl.where(
        of_q,
        tl.load(weight_q + half, mask=valid, other=0.0).to(tl.float32),
        tl.load(weight_k + half, mask=valid, other=0.0).to(tl.float32),
    )
    w_high = tl.where(
        of_q,
        tl.load(weight_q + D // 2 + half, mask=valid, other=0.0).to(tl.float32),
        tl.load(weight_k + D // 2 + half, mask=valid, other=0.0).to(tl.float32),
    )
    low = ((low * scale).to(DT).to(tl.float32) * w_low).to(DT).to(tl.float32)
    high = ((high * scale).to(DT).to(tl.float32) * w_high).to(DT).to(tl.float32)
    return low, high


@triton.jit
def _to_cache(v, CLAMP: tl.constexpr, DT):
    """float8_e4m3 has no infinity: values beyond its range become its largest one."""
    if CLAMP > 0:
        v = tl.minimum(tl.maximum(v, -CLAMP), CLAMP)
    return v.to(DT)


@triton.jit
def rope_cache_write_kernel(
    qkv,  # [T, (NQ + 2 * NKV) * D]
    q_out,  # [T, NQ * D]; may be the q part of qkv
    kv,  # [places, NKV, 2, D] one layer of the cache
    cos,  # [positions, D] float32, both halves the same
    sin,  # [positions, D] float32, first half negated
    q_weight,  # [D] if NORM
    k_weight,  # [D] if NORM
    slots,  # [R]
    root,  # [R] position of each row's first query
    depths,  # [R, QUERIES] if HAS_DEPTHS
    counts,  # [R] if HAS_COUNTS
    page_table,  # [slots, max_pages] int32
    qkv_stride,
    q_stride,
    table_stride,
    pad_slot,
    eps,
    QUERIES: tl.constexpr,
    NQ: tl.constexpr,
    NKV: tl.constexpr,
    D: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CLAMP: tl.constexpr,  # largest value of the cache's type; 0: no limit
    HAS_DEPTHS: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    row = token // QUERIES
    query = token % QUERIES
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    half = tl.arange(0, HALF_BLOCK)[None, :]
    valid = half < D // 2
    inside = (head < NQ + 2 * NKV) & valid
    start = tl.load(root + row).to(tl.int64)
    position = start + query
    if HAS_DEPTHS:
        position = start + tl.load(depths + token).to(tl.int64)
    source = qkv + token * qkv_stride + head * D + half
    DT = qkv.dtype.element_ty
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + D // 2, mask=inside, other=0.0).to(tl.float32)
    turns = head < NQ + NKV
    plain_low, plain_high = low, high
    if NORM:
        low, high = _normed(low, high, head, q_weight, k_weight, half, valid, eps, NQ, D, DT)
    c = tl.load(cos + position * D + half, mask=valid, other=0.0)
    s = tl.load(sin + position * D + D // 2 + half, mask=valid, other=0.0)
    new_low = tl.where(turns, low * c - high * s, plain_low).to(DT)
    new_high = tl.where(turns, high * c + low * s, plain_high).to(DT)
    if NQ > 0:
        to_q = (head < NQ) & valid
        target = q_out + token * q_stride + head * D + half
        tl.store(target, new_low, mask=to_q)
        tl.store(target + D // 2, new_high, mask=to_q)
    if NKV > 0:
        slot = tl.load(slots + row).to(tl.int64)
        written = slot != pad_slot
        if HAS_COUNTS:
            written = written & (query < tl.load(counts + row))
        stored = start + query  # a tree's nodes lie in the order of their numbers
        page = tl.load(page_table + slot * table_stride + stored // PAGE_SIZE).to(tl.int64)
        place = page * PAGE_SIZE + stored % PAGE_SIZE
        part = tl.maximum(head - NQ, 0)  # NKV heads of k, then NKV of v
        offset = (part % NKV) * (2 * D) + (part // NKV) * D + half
        target = kv + place * (NKV * 2 * D) + offset
        to_kv = inside & (head >= NQ) & written
        CT = kv.dtype.element_ty
        tl.store(target, _to_cache(new_low.to(tl.float32), CLAMP, CT), mask=to_kv)
        tl.store(target + D // 2, _to_cache(new_high.to(tl.float32), CLAMP, CT), mask=to_kv)
