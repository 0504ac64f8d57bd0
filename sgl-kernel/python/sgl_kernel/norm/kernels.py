"""RMS norm in Triton: rows of any width in one pass, and small norms of attention heads.

The rounding is that of the reference: the sum with the residual is rounded before it is squared, the
normed value before it is multiplied by the weight.
"""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def rms_norm_kernel(
    x,  # [T, SIZE]
    residual,  # [T, SIZE], read and written if ADD
    weight,  # [SIZE]
    out,  # [T, SIZE]
    aux,  # [T, SIZE] or a slice of wider rows, written if AUX
    x_stride,
    residual_stride,
    out_stride,
    aux_stride,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    AUX: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    # No kernel writes weights: they may be read while the kernel ahead still runs.
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    if ADD:
        old = tl.load(residual + row * residual_stride + column, mask=inside, other=0.0)
        v = (v.to(tl.float32) + old.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(residual + row * residual_stride + column, v, mask=inside)
    if AUX:
        tl.store(aux + row * aux_stride + column, v.to(aux.dtype.element_ty), mask=inside)
    wide = v.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * out_stride + column, (normed * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def head_norm_kernel(
    x,  # [T, heads, SIZE], heads adjacent
    first_weight,  # [SIZE], of heads below SPLIT
    second_weight,  # [SIZE], of the others
    out,  # [T, heads, SIZE]
    x_stride,
    out_stride,
    eps,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (head < HEADS) & (column < SIZE)
    first = tl.load(first_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    second = tl.load(second_weight + column, mask=column < SIZE, other=0.0).to(tl.float32)
    begin_dependent(PDL)
    v = tl.load(x + token * x_stride + head * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(v * v, 1) / SIZE + eps)
    normed = (v * scale[:, None]).to(out.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.where(head < SPLIT, first, second)
    target = out + token * out_stride + head * SIZE + column
    tl.store(target, scaled.to(out.dtype.element_ty), mask=inside)
