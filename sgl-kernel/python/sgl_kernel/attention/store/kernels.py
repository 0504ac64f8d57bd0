"""Write keys and values of new tokens into a pool."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def store_kernel(
    k, v, kv, places, kv_scale, k_stride, v_stride,
    NKV: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, BD: tl.constexpr,
    SCALED: tl.constexpr, FP8: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program t writes all heads of token t."""
    begin_dependent(PDL)
    token = tl.program_id(0)
    place = tl.load(places + token)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, BD)
    inside = (head < NKV)[:, None] & (d < D)[None, :]
    at = (head * D)[:, None] + d[None, :]
    key = tl.load(k + token.to(tl.int64) * k_stride + at, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + token.to(tl.int64) * v_stride + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        key /= tl.load(kv_scale + head * 2, mask=head < NKV, other=1.0)[:, None]
        value /= tl.load(kv_scale + head * 2 + 1, mask=head < NKV, other=1.0)[:, None]
    # A masked value is multiplied by 0, which does not silence NaN: so the key carries the fault.
    finite = (value - value) == 0.0
    broken = tl.min(finite.to(tl.int32), 1) == 0
    key = tl.where(broken[:, None], float("nan"), key)
    value = tl.where(broken[:, None], 0.0, value)
    if FP8:
        # e4m3 has no infinity: what is too large becomes 448. The comparison lets NaN through.
        key = tl.where(key > 448.0, 448.0, tl.where(key < -448.0, -448.0, key))
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    out = kv + place * (NKV * 2 * D) + (head * 2 * D)[:, None] + d[None, :]
    tl.store(out, key.to(kv.dtype.element_ty), mask=inside)
    tl.store(out + D, value.to(kv.dtype.element_ty), mask=inside)
