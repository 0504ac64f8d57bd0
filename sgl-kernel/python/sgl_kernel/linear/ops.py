"""Products of a few rows with a weight matrix, and what a layer does right before and after them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import device_info, interpreting, use_kernel
from sgl_kernel.launch import Launch, compute_type, next_power_of_2
from sgl_kernel.linear.variants import TORCH, Problem, Variant, default_variant


@dataclass(frozen=True, slots=True)
class InputNorm:
    """RMS norm of the input's rows, applied on the way in."""

    weight: torch.Tensor  # [K]
    eps: float


MAX_SPLIT_TILES = 4096


def split_counters(device: torch.device | str) -> torch.Tensor:
    """What programs that share a tile count in: zeros before and after every launch, so one for all.

    For launches of one stream; [MAX_SPLIT_TILES] int32.
    """
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class Fusion:
    """What is done with the input and the result of a product."""

    norm: InputNorm | None = None
    gated: bool = False  # the weights are gate and up: the result is silu(gate) * up
    bias: torch.Tensor | None = None  # [N], not with ``gated``
    residual: torch.Tensor | None = None  # [M, N] is added; it may be ``out`` itself


NOTHING = Fusion()


def small_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    fusion: Fusion = NOTHING,
    *,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    variant: Variant | None = None,
    counters: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """``x @ weight^T`` [M, N] with float32 sums, for up to 32 rows by kernels of our own.

    x: [M, K], rows may lie apart; weight: [N, K] (``gated``: [2 * N, K],
    gate first), contiguous, bfloat16 or float16; out: [M, N] of x's dtype or ``out_dtype`` (float32 for
    an lm_head, whose logits must not be rounded). Result and sums are the same at every run.
    ``variant`` None: a default; more rows than it serves go to the library. counters: ``split_counters``;
    None: made anew where it takes them, which costs a launch.
    """
    problem = problem_of(x, weight, fusion)
    if out is None:
        out = torch.empty(problem.rows, problem.n, dtype=out_dtype or x.dtype, device=x.device)
    if problem.rows == 0:
        return out
    info = device_info(x.device)
    variant = variant or default_variant(problem, info.arch, info.num_sms)
    if variant.kind == "torch" or not use_kernel(x):
        return small_linear_ref(x, weight, fusion, out)
    linear_launch(x, weight, fusion, out, variant, counters, pdl=pdl).run()
    return out


def problem_of(x: torch.Tensor, weight: torch.Tensor, fusion: Fusion) -> Problem:
    n = weight.shape[0] // (2 if fusion.gated else 1)
    return Problem(n, weight.shape[1], x.shape[0], fusion.gated)


def small_linear_ref(
    x: torch.Tensor, weight: torch.Tensor, fusion: Fusion, out: torch.Tensor
) -> torch.Tensor:
    """By the library: also what serves where no kernel of ours is the fastest."""
    if fusion.norm is not None:
        normed = F.rms_norm(x.float(), (x.shape[1],), None, fusion.norm.eps).to(x.dtype)
        x = normed * fusion.norm.weight
    if out.dtype == torch.float32 and x.is_cuda and x.dtype != torch.float32:
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
    elif x.is_cuda:
        y = torch.mm(x, weight.t())
    else:
        y = x.float() @ weight.float().t()
    if fusion.gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    for term in (fusion.bias, fusion.residual):
        y = y if term is None else y + term
    return out.copy_(y)


def linear_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    fusion: Fusion,
    out: torch.Tensor,
    variant: Variant,
    counters: torch.Tensor | None = None,
    *,
    pdl: bool,
) -> Launch:
    problem = problem_of(x, weight, fusion)
    assert variant.kind != "torch" and weight.is_contiguous()
    assert x.shape[1] == problem.k and x.stride(1) == 1 and out.stride(1) == 1
    assert not (fusion.gated and fusion.bias is not None)
    pdl = pdl and device_info(x.device).has_pdl
    if variant.kind == "gemv":
        return _gemv_launch(x, weight, fusion, out, problem, variant, pdl)
    return _gemm_launch(x, weight, fusion, out, problem, variant, counters, pdl)


def _ends(
    fusion: Fusion, out: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[int, ...], dict[str, bool]]:
    """bias, residual, out; the strides of the last two; and which there are."""
    residual = out if fusion.residual is None else fusion.residual
    bias = out if fusion.bias is None else fusion.bias
    flags = {
        "GATED": fusion.gated,
        "BIAS": fusion.bias is not None,
        "RESIDUAL": fusion.residual is not None,
        "NORM": fusion.norm is not None,
    }
    assert residual.stride(1) == 1
    return (bias, residual, out), (residual.stride(0), out.stride(0)), flags


def _norm_of(fusion: Fusion, x: torch.Tensor) -> tuple[torch.Tensor, float]:
    return (x, 0.0) if fusion.norm is None else (fusion.norm.weight, fusion.norm.eps)


def _gemv_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    fusion: Fusion,
    out: torch.Tensor,
    problem: Problem,
    variant: Variant,
    pdl: bool,
) -> Launch:
    from sgl_kernel.linear.kernels import gemv_kernel

    assert problem.rows == 1
    ends, _, flags = _ends(fusion, out)
    norm, eps = _norm_of(fusion, x)
    tiles = -(-problem.n // variant.block_n)
    programs = variant.programs_per_sm * device_info(x.device).num_sms
    loop = 0 < programs < tiles
    return Launch(
        gemv_kernel,
        (programs if loop else tiles,),
        (x, weight, norm, *ends, problem.n, eps),
        {
            "K": problem.k,
            "K_PAD": next_power_of_2(problem.k),
            "BLOCK_N": variant.block_n,
            "EVEN": problem.n % variant.block_n == 0,
            "LOOP": loop,
            **flags,
            "PDL": pdl,
        },
        num_warps=variant.num_warps,
        num_stages=1,
        pdl=pdl,
    )


def _gemm_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    fusion: Fusion,
    out: torch.Tensor,
    problem: Problem,
    variant: Variant,
    counters: torch.Tensor | None,
    pdl: bool,
) -> Launch:
    from sgl_kernel.linear.kernels import small_gemm_kernel

    ends, strides, flags = _ends(fusion, out)
    norm, eps = _norm_of(fusion, x)
    split, rows, k = variant.split, problem.rows, problem.k
    steps, tiles = -(-k // variant.block_k), -(-problem.n // variant.block_n)
    chunk = -(-steps // split) * variant.block_k
    assert k % variant.block_k == 0 and rows <= 32 and (split - 1) * chunk < k
    part = squares = out
    if split > 1:
        width = problem.n * (2 if fusion.gated else 1)
        part = torch.empty(split, rows, width, dtype=torch.float32, device=x.device)
        squares = torch.empty(tiles, split, rows, dtype=torch.float32, device=x.device)
        counters = split_counters(x.device) if counters is None else counters
        assert tiles <= counters.numel()
    constants: dict[str, Any] = {
        "K": k,
        "CHUNK": chunk,
        "SPLIT": split,
        "BLOCK_M": 16 if rows <= 16 else 32,
        "BLOCK_N": variant.block_n,
        "BLOCK_K": variant.block_k,
        "STAGES": variant.stages,
        "PREFETCH": 0 if interpreting() or not pdl else variant.prefetch,
        **flags,
        "CT": compute_type(x.dtype),
        "PDL": pdl,
    }
    parts = (part, squares, out if counters is None else counters)
    return Launch(
        small_gemm_kernel,
        (tiles, split),
        (x, weight, norm, *ends, *parts, x.stride(0), *strides, rows, problem.n, eps),
        constants,
        num_warps=variant.num_warps,
        num_stages=variant.stages,
        pdl=pdl,
    )


__all__ = [
    "TORCH",
    "Fusion",
    "InputNorm",
    "linear_launch",
    "small_linear",
    "small_linear_ref",
    "split_counters",
]
