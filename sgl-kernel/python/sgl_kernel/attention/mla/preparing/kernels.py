"""What stands between the products of a layer with latent attention and the attention itself, in Triton.

The queries' turned parts, the latent's norm and its write, and the products that take queries to the latents
and sums of latents to values.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def angles_of(cos, sin, position, half, valid, ROPE: tl.constexpr):
    """Both halves of cos are the same; the second half of sin is the positive one."""
    at = position * ROPE + half
    return tl.load(cos + at, mask=valid, other=0.0), tl.load(sin + at + ROPE // 2, mask=valid, other=0.0)


@triton.jit
def turned_halves(
    source, half, inside, c, s, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, DT: tl.constexpr
):
    """The two halves of what is turned, float32 numbers of DT. source: to the first number."""
    if INTERLEAVED:
        low = tl.load(source + 2 * half, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + 2 * half + 1, mask=inside, other=0.0).to(tl.float32)
    else:
        low = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(source + half + ROPE // 2, mask=inside, other=0.0).to(tl.float32)
    return (low * c - high * s).to(DT).to(tl.float32), (high * c + low * s).to(DT).to(tl.float32)


@triton.jit
def _turn_queries(
    q, q_out, cos, sin, token, position, first, q_stride, out_stride,
    NQ: tl.constexpr, HEADS: tl.constexpr, Q_DIM: tl.constexpr, OUT_DIM: tl.constexpr, ROPE: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The last ROPE numbers of heads first … first + HEADS - 1 of one token."""
    half = tl.arange(0, HALF)[None, :]
    head = first + tl.arange(0, HEADS)[:, None]
    valid = half < ROPE // 2
    inside = (head < NQ) & valid
    c, s = angles_of(cos, sin, position, half, valid, ROPE)
    DT: tl.constexpr = q.dtype.element_ty
    source = q + token * q_stride + head * Q_DIM + (Q_DIM - ROPE)
    low, high = turned_halves(source, half, inside, c, s, ROPE, INTERLEAVED, DT)
    if INTERLEAVED:
        tl.debug_barrier()  # in place, a pair's numbers are where other threads write
    target = q_out + token * out_stride + head * OUT_DIM + (OUT_DIM - ROPE) + half
    tl.store(target, low.to(DT), mask=inside)
    tl.store(target + ROPE // 2, high.to(DT), mask=inside)


@triton.jit
def _put(target, value, inside, is_broken, instead, scale, SCALED: tl.constexpr, FP8: tl.constexpr):
    """e4m3 has no infinity: what is too large becomes 448. The comparisons let NaN through."""
    if SCALED:
        value /= scale
    value = tl.where(is_broken, instead, value)
    if FP8:
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    tl.store(target, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _is_finite(value, inside):
    return tl.min(tl.where(inside & ((value - value) != 0.0), 0, 1), 0) != 0


@triton.jit
def _write_latent(
    down, weight, latents, kv_scale, cos, sin, slots, counts, page_table, places, token, position,
    down_stride, table_stride, pad_slot, eps,
    QUERIES: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr, PLACES: tl.constexpr, HAS_COUNTS: tl.constexpr,
    SCALED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One token's latent, normed, and its turned key."""
    row, query = token // QUERIES, token % QUERIES
    at = tl.arange(0, BLOCK)
    half = tl.arange(0, HALF)
    inside, valid = at < R, half < ROPE // 2
    DT: tl.constexpr = down.dtype.element_ty
    x = tl.load(down + token * down_stride + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / R + eps)).to(DT).to(tl.float32)
    value = (normed * w).to(DT).to(tl.float32)
    c, s = angles_of(cos, sin, position, half, valid, ROPE)
    low, high = turned_halves(down + token * down_stride + R, half, valid, c, s, ROPE, INTERLEAVED, DT)
    is_broken = (_is_finite(value, inside) & _is_finite(low, valid) & _is_finite(high, valid)) == 0
    slot = tl.load(slots + row).to(tl.int64)
    wanted = slot != pad_slot
    if HAS_COUNTS:
        wanted = wanted & (query < tl.load(counts + row))
    if PLACES:
        place = tl.load(places + token).to(tl.int64)
    else:
        page = tl.load(page_table + slot * table_stride + position // PAGE_SIZE, mask=wanted, other=0)
        place = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
    latent_scale, rope_scale = 1.0, 1.0
    if SCALED:
        latent_scale = tl.load(kv_scale)
        rope_scale = tl.load(kv_scale + 1)
    target = latents + place * (R + ROPE)
    _put(target + at, value, inside & wanted, is_broken, 0.0, latent_scale, SCALED, FP8)
    target += R + half
    _put(target, low, valid & wanted, is_broken, float("nan"), rope_scale, SCALED, FP8)
    _put(target + ROPE // 2, high, valid & wanted, is_broken, float("nan"), rope_scale, SCALED, FP8)


@triton.jit
def _prepare(
    index, num_tokens, q, q_out, down, weight, latents, kv_scale, cos, sin, slots, root, counts, page_table,
    places, q_stride, out_stride, down_stride, table_stride, pad_slot, eps,
    QUERIES: tl.constexpr, NQ: tl.constexpr, Q_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    Q_DIM: tl.constexpr, OUT_DIM: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr, PLACES: tl.constexpr,
    HAS_COUNTS: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """index: of a token's part; a token's heads come in blocks, and its latent after all tokens' heads."""
    if Q_BLOCKS > 0:  # noqa: SIM102 - known when it is compiled
        if index < num_tokens * Q_BLOCKS:
            token = (index // Q_BLOCKS).to(tl.int64)
            position = tl.load(root + token // QUERIES).to(tl.int64) + token % QUERIES
            _turn_queries(
                q, q_out, cos, sin, token, position, (index % Q_BLOCKS) * HEADS, q_stride, out_stride, NQ,
                HEADS, Q_DIM, OUT_DIM, ROPE, HALF, INTERLEAVED,
            )  # fmt: skip
    if index >= num_tokens * Q_BLOCKS:
        token = (index - num_tokens * Q_BLOCKS).to(tl.int64)
        position = tl.load(root + token // QUERIES).to(tl.int64) + token % QUERIES
        _write_latent(
            down, weight, latents, kv_scale, cos, sin, slots, counts, page_table, places, token, position,
            down_stride, table_stride, pad_slot, eps, QUERIES, R, ROPE, BLOCK, HALF, INTERLEAVED, PAGE_SIZE,
            PLACES, HAS_COUNTS, SCALED, FP8,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def prepare_kernel(
    q,  # [T, NQ, Q_DIM]; its last ROPE numbers are turned
    q_out,  # [T, NQ, OUT_DIM], gets them as its last ones; may be q
    down,  # [T, R + ROPE]
    weight,  # [R] of the norm
    latents,  # [places, R + ROPE] one layer of the cache
    kv_scale,  # [2] float32 if SCALED
    cos,  # [positions, ROPE] float32, both halves the same
    sin,  # [positions, ROPE] float32, first half negated
    slots,  # [rows]
    root,  # [rows] position of each row's first token
    counts,  # [rows] if HAS_COUNTS
    page_table,  # [slots, max_pages] int32
    places,  # [T] if PLACES
    num_tokens, q_stride, out_stride, down_stride, table_stride, pad_slot, eps,
    QUERIES: tl.constexpr, NQ: tl.constexpr, Q_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    Q_DIM: tl.constexpr, OUT_DIM: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr, PLACES: tl.constexpr,
    HAS_COUNTS: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a block of a token's heads, and one a token's latent where it is written."""
    begin_dependent(PDL)
    _prepare(
        tl.program_id(0), num_tokens, q, q_out, down, weight, latents, kv_scale, cos, sin, slots, root,
        counts, page_table, places, q_stride, out_stride, down_stride, table_stride, pad_slot, eps, QUERIES,
        NQ, Q_BLOCKS, HEADS, Q_DIM, OUT_DIM, R, ROPE, BLOCK, HALF, INTERLEAVED, PAGE_SIZE, PLACES, HAS_COUNTS,
        SCALED, FP8,
    )  # fmt: skip


@triton.jit
def _weights_of(w, k, n, k_stride, n_stride, K: tl.constexpr, N: tl.constexpr):
    """[BK, BN]"""
    there = (k < K)[:, None] & (n < N)[None, :]
    return tl.load(w + k[:, None] * k_stride + n[None, :] * n_stride, mask=there, other=0.0)


@triton.jit
def _multiply(
    index, x, w, out, num_tokens, x_stride, x_head, w_head, k_stride, n_stride, out_stride, out_head,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    CT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns of one head, of all tokens. Weights are asked for before the kernel ahead is waited for."""
    COLUMNS: tl.constexpr = (N + BN - 1) // BN
    head = (index // COLUMNS).to(tl.int64)
    n = (index % COLUMNS) * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    kk = tl.arange(0, BK)
    of_head = w + head * w_head
    weights = _weights_of(of_head, kk, n, k_stride, n_stride, K, N)
    begin_dependent(PDL)
    rows = (m < num_tokens)[:, None]
    acc = tl.zeros([BM, BN], tl.float32)
    for k0 in tl.static_range(0, K, BK):
        if k0 > 0:
            weights = _weights_of(of_head, k0 + kk, n, k_stride, n_stride, K, N)
        k = k0 + kk
        at = m.to(tl.int64)[:, None] * x_stride + head * x_head + k[None, :]
        value = tl.load(x + at, mask=rows & (k < K)[None, :], other=0.0)
        acc = tl.dot(value.to(CT), weights.to(CT), acc, input_precision="ieee")
    target = out + m.to(tl.int64)[:, None] * out_stride + head * out_head + n[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=rows & (n < N)[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def head_product_kernel(
    x,  # [T, heads, K], numbers of a head adjacent
    w,  # [heads, K, N] or the transpose of it
    out,  # [T, heads, N], numbers of a head adjacent
    num_tokens, x_stride, x_head, w_head, k_stride, n_stride, out_stride, out_head,
    K: tl.constexpr, N: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    CT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program i: some columns of one head, of up to BM tokens."""
    _multiply(
        tl.program_id(0), x, w, out, num_tokens, x_stride, x_head, w_head, k_stride, n_stride, out_stride,
        out_head, K, N, BM, BN, BK, CT, PDL,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens"])
def absorb_kernel(
    q, w, out, down, weight, latents, kv_scale, cos, sin, slots, root, counts, page_table, places,
    num_tokens, q_stride, w_head, out_stride, down_stride, table_stride, pad_slot, eps,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, CT: tl.constexpr,
    QUERIES: tl.constexpr, NQ: tl.constexpr, Q_BLOCKS: tl.constexpr, HEADS: tl.constexpr,
    Q_DIM: tl.constexpr, OUT_DIM: tl.constexpr, R: tl.constexpr, ROPE: tl.constexpr, BLOCK: tl.constexpr,
    HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAGE_SIZE: tl.constexpr, PLACES: tl.constexpr,
    HAS_COUNTS: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """``prepare_kernel``, and ahead of its programs those that take the queries to the latents.

    w: [NQ, K, R] with heads ``w_head`` apart; the rest as there, ``q_out`` being ``out``.
    """
    PRODUCTS: tl.constexpr = NQ * ((R + BN - 1) // BN)
    index = tl.program_id(0)
    if index < PRODUCTS:
        _multiply(
            index, q, w, out, num_tokens, q_stride, Q_DIM, w_head, R, 1, out_stride, OUT_DIM,
            K, R, BM, BN, BK, CT, PDL,
        )  # fmt: skip
    else:
        begin_dependent(PDL)
        _prepare(
            index - PRODUCTS, num_tokens, q, out, down, weight, latents, kv_scale, cos, sin, slots, root,
            counts, page_table, places, q_stride, out_stride, down_stride, table_stride, pad_slot, eps,
            QUERIES, NQ, Q_BLOCKS, HEADS, Q_DIM, OUT_DIM, R, ROPE, BLOCK, HALF, INTERLEAVED, PAGE_SIZE,
            PLACES, HAS_COUNTS, SCALED, FP8,
        )  # fmt: skip
