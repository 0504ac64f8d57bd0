"""Attention of prefill chunks to keys and values that were made of latents, in Triton, causal.

A key has two parts: numbers of its head's own, and turned ones that all heads share. Keys come in segments,
between which the sums are kept in float32.
"""

import triton
import triton.language as tl


@triton.jit
def _load(pointers, n, d, end, D: tl.constexpr, MASKED: tl.constexpr):
    """[BN, BD]"""
    if MASKED:
        return tl.load(pointers, mask=(n < end)[:, None] & (d < D)[None, :], other=0.0)
    elif d.shape[0] != D:
        return tl.load(pointers, mask=(d < D)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _attend(
    queries, ropes, acc, top, norm, keys, turned, begin, end, seen_to, scale, kv_stride, turned_stride,
    N: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    BR: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr, MASKED: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Go on over keys begin … end - 1; row m sees those up to seen_to[m] (all, if not MASKED)."""
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    v = tl.arange(0, BV)
    for n0 in tl.range(begin, end, BN, num_stages=STAGES):
        n = n0 + tl.arange(0, BN)
        rows = n.to(tl.int64)[:, None]
        own = _load(keys + rows * kv_stride + d[None, :], n, d, end, N, MASKED).to(CT)
        shared = _load(turned + rows * turned_stride + r[None, :], n, r, end, ROPE, MASKED).to(CT)
        scores = tl.dot(queries, tl.trans(own), input_precision="ieee")
        scores = tl.dot(ropes, tl.trans(shared), scores, input_precision="ieee") * scale
        if MASKED:
            scores = tl.where((n[None, :] <= seen_to[:, None]) & (n < end)[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        mine = tl.exp2(top - new_top)
        norm = norm * mine + tl.sum(weights, 1)
        values = _load(keys + N + rows * kv_stride + v[None, :], n, v, end, V, MASKED).to(CT)
        acc = tl.dot(weights.to(CT), values, acc * mine[:, None], input_precision="ieee")
        top = new_top
    return acc, top, norm


@triton.jit
def latent_prefill_kernel(
    q,  # [T, heads, N + ROPE], turned
    kv,  # [S, heads, N + V] of this segment
    latents,  # [S, R + ROPE] of this segment: their last ROPE numbers are turned keys
    out,  # [T, heads, V]
    held,  # [T, heads, V] float32: sums between segments
    stats,  # [T, heads, 2] float32: greatest score and weight of these sums
    tiles,  # [tiles, 8] int32: see op.py
    scale, q_stride, kv_stride, latent_stride,
    HEADS: tl.constexpr, N: tl.constexpr, ROPE: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BR: tl.constexpr, BV: tl.constexpr,
    STAGES: tl.constexpr, CT: tl.constexpr,
):  # fmt: skip
    """Program (h, i) attends tile i for head h."""
    head = tl.program_id(0)
    tile = tiles + tl.program_id(1) * 8
    first_token = tl.load(tile)
    num_queries = tl.load(tile + 1)  # of the tile's
    position = tl.load(tile + 2)  # of its first query
    first_key = tl.load(tile + 3)  # in the segment
    key_position = tl.load(tile + 4)
    num_keys = tl.load(tile + 5)
    is_first = tl.load(tile + 6)
    is_last = tl.load(tile + 7)

    m = tl.arange(0, BM)
    d = tl.arange(0, BD)
    r = tl.arange(0, BR)
    v = tl.arange(0, BV)
    mine = (m < num_queries)[:, None]
    token = (first_token + m).to(tl.int64)
    of_query = q + token[:, None] * q_stride + head * (N + ROPE)
    queries = tl.load(of_query + d[None, :], mask=mine & (d < N)[None, :], other=0.0).to(CT)
    ropes = tl.load(of_query + N + r[None, :], mask=mine & (r < ROPE)[None, :], other=0.0).to(CT)
    of_head = token * HEADS + head  # [BM]
    inside = mine & (v < V)[None, :]
    held_at = held + of_head[:, None] * V + v[None, :]
    top = tl.full([BM], -1e30, tl.float32)
    norm = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    if is_first == 0:
        top = tl.load(stats + of_head * 2, mask=m < num_queries, other=-1e30)
        norm = tl.load(stats + of_head * 2 + 1, mask=m < num_queries, other=0.0)
        acc = tl.load(held_at, mask=inside, other=0.0)

    keys = kv + first_key.to(tl.int64) * kv_stride + head * (N + V)
    turned = latents + first_key.to(tl.int64) * latent_stride + R
    seen_to = position + m - key_position  # the last key that each query sees
    end = tl.minimum(num_keys, position + num_queries - key_position)
    # Keys up to that of the first query's place are seen by all rows: whole blocks need no mask.
    full = tl.maximum(tl.minimum(num_keys, position + 1 - key_position), 0) // BN * BN
    acc, top, norm = _attend(
        queries, ropes, acc, top, norm, keys, turned, 0, full, seen_to, scale, kv_stride, latent_stride,
        N, ROPE, V, BN, BD, BR, BV, STAGES, False, CT,
    )  # fmt: skip
    acc, top, norm = _attend(
        queries, ropes, acc, top, norm, keys, turned, full, end, seen_to, scale, kv_stride, latent_stride,
        N, ROPE, V, BN, BD, BR, BV, STAGES, True, CT,
    )  # fmt: skip
    if is_last != 0:
        result = acc / norm[:, None]
        out_at = out + of_head[:, None] * V + v[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)
    else:
        tl.store(held_at, acc, mask=inside)
        tl.store(stats + of_head * 2, top, mask=m < num_queries)
        tl.store(stats + of_head * 2 + 1, norm, mask=m < num_queries)
