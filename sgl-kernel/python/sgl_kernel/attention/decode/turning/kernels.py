"""What decode attention does ahead of its loop, if asked: head norms and rope, and the write of new K and V.

An element turns with the one half a head away, which is loaded a second time (out of the L1 cache): so a
row stays in the layout that the product wants. The maths and the rounding are ``rope.kernels``'.
"""

import triton
import triton.language as tl


@triton.jit
def load_pairs(rows, inside, d, D: tl.constexpr):
    """Elements d of each row, and those that they turn with. rows: [ROWS, 1] pointers, or one."""
    own = tl.load(rows + d[None, :], mask=inside, other=0.0)
    return own, tl.load(rows + ((d + D // 2) % D)[None, :], mask=inside, other=0.0)


@triton.jit
def load_angles(cos, sin, position, inside, d, D: tl.constexpr):
    """cos and signed sin, [ROWS, BD]."""
    at = position[:, None] * D + d[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def load_norm(weight, inside, d, D: tl.constexpr, NORM: tl.constexpr):
    """Weights as pairs, a copy for each row: so they are in the rows' layout. Without norms anything."""
    pair = (d, d)
    if NORM:
        at = tl.broadcast_to(d[None, :], inside.shape)
        other_at = tl.broadcast_to(((d + D // 2) % D)[None, :], inside.shape)
        own = tl.load(weight + at, mask=inside, other=0.0)
        pair = (own.to(tl.float32), tl.load(weight + other_at, mask=inside, other=0.0).to(tl.float32))
    return pair


@triton.jit
def turned(pairs, angles, weights, eps, D: tl.constexpr, NORM: tl.constexpr, DT: tl.constexpr):
    """[ROWS, BD] in DT, the type of the product that the rows come from."""
    own, other = pairs[0].to(tl.float32), pairs[1].to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(own * own, 1) / D + eps)[:, None]
        own = ((own * scale).to(DT).to(tl.float32) * weights[0]).to(DT).to(tl.float32)
        other = ((other * scale).to(DT).to(tl.float32) * weights[1]).to(DT).to(tl.float32)
    # The first half's sin is negated, so this is what ``rope.kernels`` computes of either half.
    return tl.fma(own, angles[0], other * angles[1]).to(DT)


@triton.jit
def _store_cached(target, value, inside, FP8: tl.constexpr):
    if FP8:
        # e4m3 has no infinity: what is too large becomes 448. The comparisons let NaN through.
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _load_new(
    qkv, positions, places, k_weight, row, head, slot, first_token, num_queries, q_stride, d,
    Q: tl.constexpr, Q_BLOCK: tl.constexpr, HEADS: tl.constexpr, NKV: tl.constexpr, D: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Of a row's queries and one KV head: k and its norm in pairs, v, rope positions, places. HEADS: of q."""
    new = tl.arange(0, Q_BLOCK)
    token = first_token + new
    there = (new < num_queries) & (slot > 0)
    inside = there[:, None] & (d < D)[None, :]
    rows = qkv + token.to(tl.int64)[:, None] * q_stride + (HEADS + head) * D
    pairs = load_pairs(rows, inside, d, D)
    value = tl.load(rows + NKV * D + d[None, :], mask=inside, other=0.0)
    position = tl.load(positions + token, mask=there, other=0)
    place = tl.load(places + row * Q + new, mask=there, other=0)
    return pairs, load_norm(k_weight, inside, d, D, NORM), value, position, place


@triton.jit
def _write_new(
    new, cache, cos, sin, eps, head, d, NKV: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr,
    SCALED: tl.constexpr, FP8: tl.constexpr, DT: tl.constexpr,
):  # fmt: skip
    """To the cache goes what lies in begin … end - 1: the chunks of a row part it among themselves."""
    pairs, weights, value, position, place = new
    kv, kv_scale, begin, end, first_new = cache
    n = first_new + tl.arange(0, value.shape[0])
    # No more than the row's queries: its last chunk ends with them.
    there = (n >= begin) & (n < end)
    inside = there[:, None] & (d < D)[None, :]
    angles = load_angles(cos, sin, position, inside, d, D)
    value = value.to(tl.float32)
    if SCALED:
        value /= tl.load(kv_scale + head * 2 + 1)
    # As ``rope.kernels`` does: a head whose value is not finite gets a value of 0 and a key of NaN.
    # Found out while the angles are on their way: it takes barriers.
    finite = (value - value) == 0.0
    broken = (tl.min(finite.to(tl.int32), 1) == 0)[:, None]
    key = turned(pairs, angles, weights, eps, D, NORM, DT).to(tl.float32)
    if SCALED:
        key /= tl.load(kv_scale + head * 2)
    target = kv + place[:, None] * (NKV * 2 * D) + head * 2 * D + d[None, :]
    _store_cached(target, tl.where(broken, float("nan"), key), inside, FP8)
    _store_cached(target + D, tl.where(broken, 0.0, value), inside, FP8)


@triton.jit
def turn_rows(
    qkv, q_rows, q_stride, positions, places, cos, sin, q_weight, k_weight, eps, cache, row, head, slot,
    valid, token, first_token, num_queries, d, Q: tl.constexpr, Q_BLOCK: tl.constexpr, HEADS: tl.constexpr,
    NKV: tl.constexpr, D: tl.constexpr, WRITE: tl.constexpr, NORM: tl.constexpr, SCALED: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """The turned queries [BM, BD], once this program's part of the new K and V is in the cache.

    valid, token: [BM]; q_rows: [BM, 1]; cache: the pool or the scratch, its scales, begin, end and the
    position of the first new place.
    """
    # All that needs no other load is asked for first, then what positions lead to. Turning k comes before
    # turning q, which waits for the same loads.
    DT: tl.constexpr = qkv.dtype.element_ty
    inside = valid[:, None] & (d < D)[None, :]
    position = tl.load(positions + token, mask=valid & (slot > 0), other=0)
    pairs = load_pairs(q_rows, inside, d, D)
    weights = load_norm(q_weight, inside, d, D, NORM)
    if WRITE:
        new = _load_new(
            qkv, positions, places, k_weight, row, head, slot, first_token, num_queries, q_stride, d, Q,
            Q_BLOCK, HEADS, NKV, D, NORM,
        )  # fmt: skip
    angles = load_angles(cos, sin, position, inside, d, D)
    if WRITE:
        begin, end, first_new = cache[2], cache[3], cache[4]
        has_new = (end > first_new) & (begin < end)  # never in a padded row: its end is 0
        if has_new:
            _write_new(new, cache, cos, sin, eps, head, d, NKV, D, NORM, SCALED, FP8, DT)
            # The loop reads these places as any other. The barrier orders what this program's threads
            # stored before it with what they read after it; the loop's cp.async are ordinary reads (of the
            # generic proxy, unlike TMA's) that begin after it, and they go past the L1 cache to the L2, as
            # the stores do. No other program reads these places of this head in this launch.
            tl.debug_barrier()
    return turned(pairs, angles, weights, eps, D, NORM, DT)
