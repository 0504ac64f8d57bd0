"""A packed matrix as the library wants it, for products of many rows."""

import triton
import triton.language as tl

from sgl_kernel.moe.unpacking.kernels import FP8, INT4


@triton.jit
def dequantise_kernel(
    data,  # [N, K / 8] int32, or [N, K] float8
    scale,
    global_scale,  # [PARTS] if there is one
    out,  # [N, K]
    N,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    PARTS: tl.constexpr,  # of the rows: with a scale of their own (NVFP4), or blocks counted apart (FP8)
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (n, b): BLOCK columns of row n; by float32, rounded once."""
    n = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = k < K
    half = N // PARTS
    part = n // half
    if FORMAT == FP8:
        value = tl.load(data + n * K + tl.minimum(k, K - 1)).to(tl.float32)
        line = part * tl.cdiv(half, SCALE_ROWS) + (n - part * half) // SCALE_ROWS
        columns: tl.constexpr = (K + SCALE_COLUMNS - 1) // SCALE_COLUMNS
        value *= tl.load(scale + line * columns + k // SCALE_COLUMNS, mask=inside, other=0.0)
    else:
        word = tl.load(data + n * (K // 8) + k // 8, mask=inside, other=0)
        code = (word >> ((k % 8) * 4)) & 15
        GROUP: tl.constexpr = 32 if FORMAT == INT4 else 16
        own = tl.load(scale + n * (K // GROUP) + k // GROUP, mask=inside, other=0.0).to(tl.float32)
        if FORMAT == INT4:
            value = (code - 8).to(tl.float32) * own
        else:
            mantissa = 1.0 + 0.5 * (code & 1).to(tl.float32)
            exponent = (code >> 1) & 3
            power = tl.where(exponent == 3, 4.0, tl.where(exponent == 2, 2.0, 1.0))
            size = tl.where(exponent == 0, 0.5 * (code & 1).to(tl.float32), mantissa * power)
            value = tl.where((code & 8) != 0, -size, size) * own * tl.load(global_scale + part)
    tl.store(out + n * K + k, value.to(out.dtype.element_ty), mask=inside)
