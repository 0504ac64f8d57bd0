"""Attention of decode, verify and draft rows over a paged cache, by a plan made on the device."""

from __future__ import annotations

import math

import torch

from sgl_kernel._dispatch import use_kernel
from sgl_kernel.attention.decode.plan import DecodePlan
from sgl_kernel.attention.decode.reference import decode_attention_ref
from sgl_kernel.launch import Launch, compute_type


def decode_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: DecodePlan,
    kv_scale: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one layer. Scores are scaled by d ** -0.5.

    q: [R * Q, nq, d], heads contiguous; kv: [places, nkv, 2 (k, v), d], contiguous, in q's type or
    float8_e4m3fn; kv_scale: [nkv, 2] float32, what stored keys and values are multiplied by;
    scratch: [rows, scratch_cap, nkv, 2, d], in kv's type, if the plan's view has scratch places.
    out: [R * Q, nq, d], contiguous; made if not given. Returns it; zeros for rows of slot 0.

    Keys of places a query must not see may hold anything; values there must be finite (``store_kv``
    sees to it), and so must values of the row's own other queries.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if use_kernel(q):
        decode_launch(q, kv, out, plan, kv_scale, scratch).run()
    else:
        out.copy_(decode_attention_ref(q, kv, plan, kv_scale, scratch))
    return out


def decode_launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    kv_scale: torch.Tensor | None,
    scratch: torch.Tensor | None,
) -> Launch:
    from sgl_kernel.attention.decode import kernels

    shape, view, config = plan.shape, plan.view, plan.config
    head_dim = shape.head_dim
    assert q.stride()[1:] == (head_dim, 1) and kv.is_contiguous() and out.is_contiguous()
    assert kv_scale is None or kv_scale.shape == (shape.num_kv_heads, 2)
    scratch_offset = 0
    if view.scratch:
        assert scratch is not None and scratch.is_contiguous() and scratch.dtype == kv.dtype
        # One address space: a place is reached from the pool's start wherever it lies.
        scratch_offset = (scratch.data_ptr() - kv.data_ptr()) // kv.element_size()
    tiles = -(-view.query_len * shape.group // config.block_m)
    return Launch(
        kernels.decode_kernel,
        (plan.num_items, tiles),
        (
            q, out, kv, plan.items, plan.base_lens, plan.bits, plan.page_table,
            plan.sums if kv_scale is None else kv_scale, plan.partial, plan.sums, plan.counters,
            head_dim**-0.5 * math.log2(math.e), q.stride(0), plan.page_table.stride(0),
            plan.num_partials, scratch_offset, plan.scratch_cap,
        ),
        {
            "Q": view.query_len,
            "G": shape.group,
            "NKV": shape.num_kv_heads,
            "D": head_dim,
            "PAGE": shape.page_size,
            "EXTRA": view.extra,
            "CAUSAL": view.causal and view.query_len > 1,
            "WORDS": view.words,
            "SCRATCH": view.scratch,
            "SCALED": kv_scale is not None,
            "BM": config.block_m,
            "BN": config.block_n,
            "BD": 1 << (head_dim - 1).bit_length(),
            "STAGES": config.num_stages,
            "FAN_IN": config.fan_in,
            "AT_ONCE": config.at_once,
            "CT": compute_type(q.dtype),
            "PDL": plan.pdl,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
        pdl=plan.pdl,
    )  # fmt: skip
