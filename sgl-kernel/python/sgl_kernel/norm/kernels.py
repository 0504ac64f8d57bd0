"""RMS norm in Triton: rows of any width in one pass.

The rounding is that of the reference: the normed value is rounded before it is multiplied by the weight.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def normed_row(wide, w, eps, SIZE: tl.constexpr, DTYPE: tl.constexpr):
    """wide, w: [BLOCK] float32, of which all after SIZE are 0 -> [BLOCK] of DTYPE."""
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(DTYPE).to(tl.float32)
    return (normed * w).to(DTYPE)


@triton.jit
def rms_norm_kernel(
    x,  # [T, SIZE]
    weight,  # [SIZE]
    out,  # [T, SIZE]
    x_stride,
    out_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    # No kernel writes weights: they may be read while the kernel ahead still runs.
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    wide = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed_row(wide, w, eps, SIZE, out.dtype.element_ty)
    tl.store(out + row * out_stride + column, normed, mask=inside)
