"""What stands between an indexer's products and its scores, in Triton: norm, rope and factors."""

import triton
import triton.language as tl

from sgl_kernel.attention.mla.preparing.kernels import angles_of, turned_halves
from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def _turn_heads(
    q, cos, sin, token, first, q_stride,
    HEADS: tl.constexpr, AT_ONCE: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """The first ROPE numbers of heads first … first + AT_ONCE - 1 of one token, where they are."""
    half = tl.arange(0, HALF)[None, :]
    head = first + tl.arange(0, AT_ONCE)[:, None]
    valid = half < ROPE // 2
    inside = (head < HEADS) & valid
    c, s = angles_of(cos, sin, token, half, valid, ROPE)
    DT: tl.constexpr = q.dtype.element_ty
    source = q + token * q_stride + head * D
    low, high = turned_halves(source, half, inside, c, s, ROPE, INTERLEAVED, DT)
    tl.debug_barrier()  # a pair's numbers may be where other threads write
    tl.store(source + half, low.to(DT), mask=inside)
    tl.store(source + half + ROPE // 2, high.to(DT), mask=inside)


@triton.jit
def _normed(row, at, inside, mean, factor, weight, bias, DT: tl.constexpr):
    value = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0)
    b = tl.load(bias + at, mask=inside, other=0.0)
    return ((value - mean) * factor * w + b).to(DT).to(tl.float32)


@triton.jit
def _make_key(
    k, k_out, weight, bias, cos, sin, token, k_stride, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Layer norm in float32, rounded; then its first ROPE numbers are turned."""
    at, half = tl.arange(0, BLOCK), tl.arange(0, HALF)
    inside, valid = at < D, half < ROPE // 2
    DT: tl.constexpr = k.dtype.element_ty
    row = k + token * k_stride
    x = tl.load(row + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / D
    apart = tl.where(inside, x - mean, 0.0)
    factor = tl.rsqrt(tl.sum(apart * apart, 0) / D + eps)
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    OTHER: tl.constexpr = 1 if INTERLEAVED else ROPE // 2
    low = _normed(row, STEP * half, valid, mean, factor, weight, bias, DT)
    high = _normed(row, STEP * half + OTHER, valid, mean, factor, weight, bias, DT)
    rest = _normed(row, at, inside, mean, factor, weight, bias, DT)
    c, s = angles_of(cos, sin, token, half, valid, ROPE)
    target = k_out + token * D
    tl.store(target + half, (low * c - high * s).to(DT), mask=valid)
    tl.store(target + half + ROPE // 2, (high * c + low * s).to(DT), mask=valid)
    tl.store(target + at, rest.to(DT), mask=inside & (at >= ROPE))


@triton.jit(do_not_specialize=["num_tokens"])
def index_kernel(
    q,  # [T, HEADS, D] if Q_BLOCKS; turned in place
    weights,  # [T, HEADS] float32 if Q_BLOCKS; multiplied in place
    k,  # [T, D]
    k_out,  # [T, D]
    norm_weight,  # [D] float32
    norm_bias,  # [D] float32
    cos,  # [T, ROPE] float32, both halves the same
    sin,  # [T, ROPE] float32, first half negated
    num_tokens, q_stride, weights_stride, k_stride, scale, eps,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, AT_ONCE: tl.constexpr, Q_BLOCKS: tl.constexpr,
    D: tl.constexpr, BLOCK: tl.constexpr, ROPE: tl.constexpr, HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program a block of a token's heads, and one for its key and weights."""
    begin_dependent(PDL)
    index = tl.program_id(0)
    if Q_BLOCKS > 0:  # noqa: SIM102 - known when it is compiled
        if index < num_tokens * Q_BLOCKS:
            token = (index // Q_BLOCKS).to(tl.int64)
            _turn_heads(
                q, cos, sin, token, (index % Q_BLOCKS) * AT_ONCE, q_stride, HEADS, AT_ONCE, D, ROPE, HALF,
                INTERLEAVED,
            )  # fmt: skip
    if index >= num_tokens * Q_BLOCKS:
        token = (index - num_tokens * Q_BLOCKS).to(tl.int64)
        _make_key(
            k, k_out, norm_weight, norm_bias, cos, sin, token, k_stride, eps, D, BLOCK, ROPE, HALF,
            INTERLEAVED,
        )  # fmt: skip
        if Q_BLOCKS > 0:
            head = tl.arange(0, HEADS_PAD)
            of_token = weights + token * weights_stride + head
            value = tl.load(of_token, mask=head < HEADS, other=0.0)
            tl.store(of_token, value * scale, mask=head < HEADS)
