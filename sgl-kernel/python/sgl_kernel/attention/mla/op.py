"""Attention of decode, verify and draft rows over a paged cache of latents, by a plan made on the device.

The cache of a layer is ``[places, R + r]``: a token's latent of R numbers, of which a head's key and value
are made by a linear map, and a key of r turned numbers that all heads share. The map is taken to the query's
side: a query has R + r numbers a head, and what comes out are sums of latents.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from sgl_kernel._dispatch import DeviceInfo, use_kernel
from sgl_kernel.attention.decode.config import DecodeConfig
from sgl_kernel.attention.decode.plan import AttentionShape, DecodePlan, DecodeWorkspace
from sgl_kernel.attention.mla.config import latent_config
from sgl_kernel.attention.mla.reference import latent_attention_ref, write_latents_ref
from sgl_kernel.launch import Launch, compute_type, next_power_of_2


class LatentWorkspace(DecodeWorkspace):
    """Buffers of one model's latent attention: ``plan_decode`` makes its plans of them.

    A plan's shape has one KV head for all heads, and R as its head size.
    """

    def __init__(
        self,
        num_heads: int,
        latent_dim: int,
        page_size: int,
        device: torch.device,
        kv_itemsize: int,
        info: DeviceInfo | None = None,
        pdl: bool = False,
        config: DecodeConfig | None = None,
    ) -> None:
        shape = AttentionShape(num_heads, 1, latent_dim, page_size)
        super().__init__(shape, device, kv_itemsize, info, pdl, config)

    def usual_config(self, query_len: int) -> DecodeConfig:
        shape = self.shape
        return latent_config(self.info.arch, query_len, shape.num_heads, shape.head_dim, self.kv_itemsize)


def latent_attention(
    q: torch.Tensor,
    latents: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    kv_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one layer.

    q: [R * Q, nq, R + r], heads contiguous; latents: [places, R + r], contiguous, in q's type or
    float8_e4m3fn; plan: of a ``LatentWorkspace``; scale: of the scores;
    kv_scale: [2] float32, what stored latents and turned keys are multiplied by. out: [R * Q, nq, R],
    contiguous; made if not given; scratch: [rows, cap, R + r], contiguous, in the cache's type, with a view
    of scratch places. Returns out: sums of latents, zeros for rows of slot 0.

    A place that a query must not see may have anything in its turned key; latents there must be finite
    where they are other queries' of the same row (``write_latents`` sees to it).
    """
    num_tokens, num_heads = plan.slots.shape[0] * plan.view.query_len, plan.shape.num_heads
    assert q.shape == (num_tokens, num_heads, latents.shape[1])
    assert plan.view.scratch == (scratch is not None) and plan.view.query_start is None
    if out is None:
        out = q.new_empty(num_tokens, num_heads, plan.shape.head_dim)
    if use_kernel(out):
        latent_launch(q, latents, out, plan, scale, kv_scale, scratch).run()
    else:
        out.copy_(latent_attention_ref(q, latents, plan, scale, kv_scale, scratch))
    return out


def latent_launch(
    q: torch.Tensor,
    latents: torch.Tensor,
    out: torch.Tensor,
    plan: DecodePlan,
    scale: float,
    kv_scale: torch.Tensor | None,
    scratch: torch.Tensor | None = None,
) -> Launch:
    from sgl_kernel.attention.mla.attending.kernels import latent_kernel

    shape, view, config = plan.shape, plan.view, plan.config
    plan.check_levels()
    assert q.stride()[1:] == (latents.shape[1], 1) and latents.is_contiguous() and out.is_contiguous()
    assert kv_scale is None or kv_scale.shape == (2,)
    rope_dim, scratch_offset = latents.shape[1] - shape.head_dim, 0
    if scratch is not None:
        assert scratch.is_contiguous() and scratch.dtype == latents.dtype
        # One address space: a place is reached from the pool's start wherever it lies.
        scratch_offset = (scratch.data_ptr() - latents.data_ptr()) // latents.element_size()
    return Launch(
        latent_kernel,
        (plan.num_tiles, plan.num_items),  # tiles of an item side by side: they read the same latents
        (
            q, out, latents, plan.items, plan.base_lens, plan.bits, plan.page_table,
            plan.sums if kv_scale is None else kv_scale, plan.partial, plan.sums, plan.counters,
            scale * math.log2(math.e), q.stride(0), plan.page_table.stride(0), plan.num_partials,
            scratch_offset, plan.scratch_cap,
        ),
        {
            "Q": view.query_len,
            "HEADS": shape.num_heads,
            "R": shape.head_dim,
            "ROPE": rope_dim,
            "PAGE": shape.page_size,
            "EXTRA": view.extra,
            "CAUSAL": view.causal and view.query_len > 1,
            "WORDS": view.words,
            "SCRATCH": view.scratch,
            "SCALED": kv_scale is not None,
            "BM": config.block_m,
            "BN": config.block_n,
            "BD": next_power_of_2(shape.head_dim),
            "BR": next_power_of_2(rope_dim),
            "STAGES": config.num_stages,
            "FAN_IN": config.fan_in,
            "AT_ONCE": config.at_once,
            "CT": _compute_type(q, latents),
            "PDL": plan.pdl,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        max_registers=config.max_registers,
        pdl=plan.pdl,
    )  # fmt: skip


def _compute_type(q: torch.Tensor, latents: torch.Tensor) -> Any:
    """Two numbers of e4m3 are two of float16 by one instruction, and bfloat16 by several; both are exact."""
    narrow = latents.dtype == torch.float8_e4m3fn and q.dtype == torch.bfloat16
    return compute_type(torch.float16 if narrow else q.dtype)


def write_latents(
    latent: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    latents: torch.Tensor,
    latent_dim: int,
    kv_scale: torch.Tensor | None = None,
    pdl: bool = False,
) -> None:
    """Put what the cache keeps of T tokens in its places; nothing where the slot is 0.

    latent: [T, R + r], the normed latent, then the turned key, rows contiguous; slots, places: [T] int64;
    latents: [places, R + r]; latent_dim: R; kv_scale: as in ``latent_attention``.

    A token with a number that is not finite gets a latent of 0 and a turned key of NaN: a masked key is
    silent, a masked value is not (0 times NaN is NaN). So it breaks the queries that see it and no other.
    """
    assert latent.shape[1] == latents.shape[1] and latents.is_contiguous()
    if use_kernel(latents):
        write_launch(latent, slots, places, latents, latent_dim, kv_scale, pdl).run()
    else:
        write_latents_ref(latent, slots, places, latents, latent_dim, kv_scale)


def write_launch(
    latent: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    latents: torch.Tensor,
    latent_dim: int,
    kv_scale: torch.Tensor | None,
    pdl: bool,
) -> Launch:
    from sgl_kernel.attention.mla.writing.kernels import write_kernel

    assert latent.stride(1) == 1
    return Launch(
        write_kernel,
        (latent.shape[0],),
        (latent, slots, places, latents, slots if kv_scale is None else kv_scale, latent.stride(0)),
        {
            "R": latent_dim,
            "WIDTH": latent.shape[1],
            "BLOCK": next_power_of_2(latent.shape[1]),
            "SCALED": kv_scale is not None,
            "FP8": latents.dtype == torch.float8_e4m3fn,
            "PDL": pdl,
        },
        num_warps=4,
        pdl=pdl,
    )
