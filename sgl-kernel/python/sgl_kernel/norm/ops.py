"""RMS norm, with the residual stream's sum and the copy that a drafter reads; norms of heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.launch import Launch, next_power_of_2


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    aux: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``v / rms(v) * weight`` [T, H], where v is ``x``, or ``residual + x`` if a residual is given.

    x: [T, H]; weight: [H]; residual: [T, H], changed in place to v (rounded to its dtype); aux: [T, H],
    a slice of wider rows as a rule, gets v as well (the layer's input, as EAGLE-3 captures it); out:
    [T, H], may be x. Rows may lie apart, columns not. Statistics are float32.
    """
    out = torch.empty_like(x) if out is None else out
    if x.shape[0] == 0:
        return out
    if not use_kernel(x):
        return rms_norm_ref(x, weight, eps, residual, aux, out)
    rms_norm_launch(x, weight, eps, residual, aux, out, pdl=pdl).run()
    return out


def rms_norm_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    aux: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    if residual is not None:
        x = residual.add_(x)
    if aux is not None:
        aux.copy_(x)
    return out.copy_(_normed(x, eps) * weight)


def rms_norm_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None,
    aux: torch.Tensor | None,
    out: torch.Tensor,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.norm.kernels import rms_norm_kernel

    num_rows, size = x.shape
    block = next_power_of_2(size)
    res = x if residual is None else residual
    copy = x if aux is None else aux
    assert all(t.shape == x.shape and t.stride(1) == 1 for t in (x, res, copy, out)), "rows of one width"
    assert weight.shape == (size,) and weight.is_contiguous()
    strides = (x.stride(0), res.stride(0), out.stride(0), copy.stride(0))
    pdl = pdl and device_info(x.device).has_pdl
    return Launch(
        rms_norm_kernel,
        (num_rows,),
        (x, res, weight, out, copy, *strides, eps),
        {"SIZE": size, "BLOCK": block, "ADD": residual is not None, "AUX": aux is not None, "PDL": pdl},
        # Few rows: latency counts, so many warps; 16 bytes a thread and load at least.
        num_warps=max(1, min(8, block // 256)),
        pdl=pdl,
    )


def head_norm(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    num_q_heads: int,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Norm of every head by itself, as Qwen3 has it before the rope.

    x: [T, heads, d], the heads of a token adjacent (the q and k part of a qkv product); q_weight: [d],
    of the first ``num_q_heads``; k_weight: [d], of the others; out: as x, may be x.
    """
    out = torch.empty_like(x) if out is None else out
    if x.shape[0] == 0:
        return out
    if not use_kernel(x):
        return head_norm_ref(x, q_weight, k_weight, num_q_heads, eps, out)
    head_norm_launch(x, q_weight, k_weight, num_q_heads, eps, out, pdl=pdl).run()
    return out


def head_norm_ref(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    num_q_heads: int,
    eps: float,
    out: torch.Tensor,
) -> torch.Tensor:
    num_others = x.shape[1] - num_q_heads
    weight = torch.cat((q_weight.expand(num_q_heads, -1), k_weight.expand(num_others, -1)))
    return out.copy_(_normed(x, eps) * weight)


def head_norm_launch(
    x: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    num_q_heads: int,
    eps: float,
    out: torch.Tensor,
    *,
    pdl: bool,
) -> Launch:
    from sgl_kernel.norm.kernels import head_norm_kernel

    num_tokens, num_heads, size = x.shape
    assert all(t.stride()[1:] == (size, 1) for t in (x, out)), "the heads of a token are adjacent"
    block = next_power_of_2(size)
    head_block = max(1, 1024 // block)
    pdl = pdl and device_info(x.device).has_pdl
    return Launch(
        head_norm_kernel,
        (num_tokens, -(-num_heads // head_block)),
        (x, q_weight, k_weight, out, x.stride(0), out.stride(0), eps),
        {
            "HEADS": num_heads,
            "SPLIT": num_q_heads,
            "SIZE": size,
            "HEAD_BLOCK": head_block,
            "BLOCK": block,
            "PDL": pdl,
        },
        num_warps=2,
        pdl=pdl,
    )


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Rounded to x's dtype before a weight is applied, as transformers does."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return F.rms_norm(wide, (x.shape[-1],), None, eps).to(x.dtype)
