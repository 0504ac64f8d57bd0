"""New latents to their places."""

import triton
import triton.language as tl

from sgl_kernel.common.kernels import begin_dependent


@triton.jit
def write_kernel(
    latent, slots, places, latents, kv_scale, stride,
    R: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, FP8: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program t writes token t."""
    begin_dependent(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    there = (at < WIDTH) & (tl.load(slots + token) > 0)
    value = tl.load(latent + token * stride + at, mask=there, other=0.0).to(tl.float32)
    place = tl.load(places + token)
    finite = (value - value) == 0.0
    is_broken = tl.min(finite.to(tl.int32), 0) == 0
    if SCALED:
        value /= tl.where(at < R, tl.load(kv_scale), tl.load(kv_scale + 1))
    value = tl.where(is_broken, tl.where(at < R, 0.0, float("nan")), value)
    if FP8:
        # e4m3 has no infinity: what is too large becomes 448. The comparisons let NaN through.
        value = tl.where(value > 448.0, 448.0, tl.where(value < -448.0, -448.0, value))
    tl.store(latents + place * WIDTH + at, value.to(latents.dtype.element_ty), mask=there)
