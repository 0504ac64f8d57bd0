"""RMS norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None, pdl: bool = False
) -> torch.Tensor:
    """``x / rms(x) * weight`` [T, H].

    x: [T, H]; weight: [H]; out: [T, H], may be x. Rows may lie apart, columns not. Statistics are float32.
    """
    out = torch.empty_like(x) if out is None else out
    if x.shape[0] == 0:
        return out
    if not use_kernel(x):
        return rms_norm_ref(x, weight, eps, out)
    rms_norm_launch(x, weight, eps, out, pdl=pdl).run()
    return out


def rms_norm_ref(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """Rounded to x's dtype before the weight is applied, as transformers does."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return out.copy_(F.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype) * weight)


def rms_norm_launch(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor, *, pdl: bool
) -> Launch:
    from sgl_kernel.norm.kernels import rms_norm_kernel

    num_rows, size = x.shape
    block = next_power_of_2(size)
    assert out.shape == x.shape and x.stride(1) == out.stride(1) == 1, "rows of one width"
    assert weight.shape == (size,) and weight.is_contiguous()
    pdl = pdl and device_info(x.device).has_pdl
    return Launch(
        rms_norm_kernel,
        (num_rows,),
        (x, weight, out, x.stride(0), out.stride(0), eps),
        {"SIZE": size, "BLOCK": block, "PDL": pdl},
        num_warps=row_warps(block),
        pdl=pdl,
    )


def row_warps(block: int) -> int:
    """Of a program that norms a row of ``block`` elements. Few rows: latency counts, so many warps; 16 bytes
    a thread and load at least."""
    return max(1, min(8, block // 256))
