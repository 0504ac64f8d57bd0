"""The weighted sum of what a token's experts gave."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def combine_kernel(
    products, weights, experts, base, out, base_stride,
    N: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr, BASE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, b): ``base + sum of weight * product`` in the order of the token's own list."""
    begin_dependent(PDL)
    token = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        used = tl.load(experts + pair) >= 0
        weight = tl.load(weights + pair).to(tl.float32)
        own = tl.load(products + pair.to(tl.int64) * N + n, mask=(n < N) & used, other=0.0)
        acc += tl.where(used, weight, 0.0) * own.to(tl.float32)
    if BASE:
        acc += tl.load(base + token.to(tl.int64) * base_stride + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * N + n, acc.to(out.dtype.element_ty), mask=n < N)
