"""Attention of decode, verify and draft rows over a paged cache, by a plan made on the device."""

from __future__ import annotations

import math

import torch

from sgl_kernel._dispatch import device_info, use_kernel
from sgl_kernel.attention.decode.plan import DecodePlan
from sgl_kernel.attention.decode.reference import decode_attention_ref
from sgl_kernel.attention.decode.turn import Turn, can_turn, turned_ref
from sgl_kernel.launch import Launch, compute_type, next_power_of_2


def decode_attention(
    q: torch.Tensor | None,
    kv: torch.Tensor,
    plan: DecodePlan,
    kv_scale: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    turn: Turn | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one layer. Scores are scaled by d ** -0.5.

    q: [T, nq, d], heads contiguous, T = R * Q, or what the view's ``query_start`` ends with;
    kv: [places, nkv, 2 (k, v), d], contiguous, in q's type or float8_e4m3fn; kv_scale: [nkv, 2] float32,
    what stored keys and values are multiplied by; scratch: [rows, scratch_cap, nkv, 2, d], in kv's type, if
    the plan's view has scratch places.
    out: [T, nq, d], contiguous; made if not given. Returns it; zeros for rows of slot 0.
    turn: instead of q, the product before norms and rope, where ``can_turn(plan)``; its K and V are
    written to their places in kv, or in scratch, as by ``rope_cache_write`` (nothing for rows of slot 0),
    then seen.
    sinks: [nq], the score of a place more that every query of a head sees, and whose value is 0.

    Keys of places a query must not see may hold anything; values there must be finite
    (``rope_cache_write`` sees to it), and so must values of the row's own other queries.
    """
    assert (q is None) != (turn is None), "queries, or what they are turned from"
    if out is None:
        source = q if turn is None else turn.qkv
        assert source is not None
        size = (source.shape[0], plan.shape.num_heads, plan.shape.head_dim)
        out = torch.empty(size, dtype=source.dtype, device=source.device)
    if use_kernel(out):
        decode_launch(q, kv, out, plan, kv_scale, scratch, turn, sinks).run()
    else:
        if turn is not None:
            assert can_turn(plan)
            own = kv if scratch is None else scratch.flatten(0, 1)
            q = turned_ref(turn, own, plan, kv_scale)
        assert q is not None
        out.copy_(decode_attention_ref(q, kv, plan, kv_scale, scratch, sinks))
    return out


def decode_launch(
    q: torch.Tensor | None,
    kv: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    kv_scale: torch.Tensor | None,
    scratch: torch.Tensor | None,
    turn: Turn | None = None,
    sinks: torch.Tensor | None = None,
) -> Launch:
    from sgl_kernel.attention.decode.kernels import decode_kernel

    shape, view, config = plan.shape, plan.view, plan.config
    plan.check_levels()
    assert kv.is_contiguous() and out.is_contiguous()
    assert kv_scale is None or kv_scale.shape == (shape.num_kv_heads, 2)
    assert sinks is None or (sinks.shape == (shape.num_heads,) and sinks.is_contiguous())
    scratch_offset = 0
    if view.scratch:
        assert scratch is not None and scratch.is_contiguous() and scratch.dtype == kv.dtype
        # One address space: a place is reached from the pool's start wherever it lies.
        scratch_offset = (scratch.data_ptr() - kv.data_ptr()) // kv.element_size()
    rows = _query_rows(q, plan) if turn is None else turn.qkv
    starts = plan.slots if view.query_start is None else view.query_start  # not read without
    pdl = plan.pdl or (turn is not None and turn.pdl and device_info(rows.device).has_pdl)
    return Launch(
        decode_kernel,
        (plan.num_items, plan.num_tiles),
        (
            rows, out, kv, plan.items, plan.base_lens, starts, plan.bits, plan.page_table,
            plan.sums if kv_scale is None else kv_scale, plan.sums if sinks is None else sinks,
            plan.partial, plan.sums, plan.counters,
            *_turn_args(turn, plan),
            shape.head_dim**-0.5 * math.log2(math.e), rows.stride(0), plan.page_table.stride(0),
            plan.num_partials, scratch_offset, plan.scratch_cap,
        ),
        {
            "Q": view.query_len,
            "G": shape.group,
            "NKV": shape.num_kv_heads,
            "D": shape.head_dim,
            "PAGE": shape.page_size,
            "EXTRA": view.extra,
            "CAUSAL": view.causal and view.query_len > 1,
            "WORDS": view.words,
            "SCRATCH": view.scratch,
            "WINDOW": view.window,
            "SINKS": sinks is not None,
            "RAGGED": view.query_start is not None,
            "SCALED": kv_scale is not None,
            "TURN": turn is not None,
            "NORM": turn is not None and turn.norms is not None,
            "FP8": kv.dtype == torch.float8_e4m3fn,
            "BM": config.block_m,
            "BN": config.block_n,
            "BD": next_power_of_2(shape.head_dim),
            "Q_BLOCK": next_power_of_2(view.query_len),
            "STAGES": config.num_stages,
            "FAN_IN": config.fan_in,
            "AT_ONCE": config.at_once,
            "CT": compute_type(rows.dtype),
            "PDL": pdl,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
        pdl=pdl,
    )  # fmt: skip


def _query_rows(q: torch.Tensor | None, plan: DecodePlan) -> torch.Tensor:
    assert q is not None and q.stride()[1:] == (plan.shape.head_dim, 1)
    return q


def _turn_args(turn: Turn | None, plan: DecodePlan) -> tuple[torch.Tensor | float, ...]:
    """cos, sin, positions, places, the norms' weights and eps; addresses that are not read without a turn."""
    if turn is None:
        return plan.sums, plan.sums, plan.slots, plan.places, plan.sums, plan.sums, 0.0
    shape, view, tables, norms = plan.shape, plan.view, turn.tables, turn.norms
    assert can_turn(plan) and view.extra in (0, view.write_start + view.query_len)
    num_heads = shape.num_heads + (2 * shape.num_kv_heads if view.writes else 0)
    num_tokens = turn.qkv.shape[0] if view.query_start is not None else plan.slots.shape[0] * view.query_len
    assert turn.qkv.shape == (num_tokens, num_heads * shape.head_dim) and turn.qkv.stride(1) == 1
    assert turn.positions.shape == (num_tokens,) and turn.positions.is_contiguous()
    assert tables.cos.is_contiguous() and tables.sin.is_contiguous()
    assert tables.cos.shape[1] == shape.head_dim and shape.head_dim % 2 == 0
    weights = (tables.cos, tables.cos, 0.0) if norms is None else (norms.q_weight, norms.k_weight, norms.eps)
    return tables.cos, tables.sin, turn.positions, plan.places, *weights
