"""Activations of gated MLPs in Triton."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def silu_and_mul_kernel(
    gate_up,  # [T, 2 * SIZE], gate first
    out,  # [T, SIZE]
    gate_up_stride,
    out_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin_dependent(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    source = gate_up + row * gate_up_stride + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + SIZE, mask=inside, other=0.0).to(tl.float32)
    DT = out.dtype.element_ty
    # Rounded between the two, as the reference does.
    activated = (gate / (1.0 + tl.exp(-gate))).to(DT).to(tl.float32)
    tl.store(out + row * out_stride + column, (activated * up).to(DT), mask=inside)
