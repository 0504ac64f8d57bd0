"""Attention of prefill chunks over a paged cache: exact lengths on the host, any mixture of them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from sgl_kernel._dispatch import DeviceInfo, device_info, use_kernel
from sgl_kernel.attention.decode.plan import AttentionShape
from sgl_kernel.attention.decode.reference import attend, last_seen
from sgl_kernel.attention.prefill.places import chunk_places, ranges
from sgl_kernel.launch import Launch, compute_type

TILE_FIELDS = 8


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What ``prefill_attention`` needs beside a layer's q and pool."""

    shape: AttentionShape
    config: PrefillConfig
    slots: tuple[int, ...]  # [R]
    starts: tuple[int, ...]  # [R] places in the cache before each chunk
    lens: tuple[int, ...]  # [R] tokens of each chunk
    page_table: torch.Tensor  # [slots, max_pages] int32
    tiles: torch.Tensor  # [num_tiles, 8] int32: see kernels.TILE_FIELDS; the longest first
    token_slots: torch.Tensor  # [T] int64
    places: torch.Tensor  # [T] int64: where the chunks' K and V go


def prefill_config(arch: int, head_dim: int, kv_itemsize: int) -> PrefillConfig:
    """Not measured yet. Two warp groups with 128 rows where wgmma and 227 KB are; 64 rows elsewhere."""
    if arch in (90, 100, 103):
        return PrefillConfig(128, 64 if head_dim <= 128 else 32, 8, 3)
    if head_dim <= 128:
        # 4 warps take 230 registers; converting a cache of 1 byte as well, they spill.
        return PrefillConfig(64, 32, 4 if kv_itemsize > 1 else 8, 3)
    return PrefillConfig(32, 16, 4, 3)


def plan_prefill(
    shape: AttentionShape,
    page_table: torch.Tensor,
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    lens: tuple[int, ...],
    kv_itemsize: int,
    info: DeviceInfo | None = None,
) -> PrefillPlan:
    """Plan a step of R chunks: lens[r] tokens of slot slots[r] from position starts[r], flattened.

    page_table: [slots, max_pages] int32; kv_itemsize: bytes of a number in the pool. Nothing is read
    back from the device.
    """
    config = prefill_config((info or device_info(page_table.device)).arch, shape.head_dim, kv_itemsize)
    tiles = _tiles(slots, starts, lens, shape.group, config.block_m)
    found = chunk_places(
        page_table, slots, starts, lens, shape.page_size, more=tiles.reshape(-1).view(np.int64)
    )
    assert found.more is not None
    return PrefillPlan(
        shape=shape,
        config=config,
        slots=slots,
        starts=starts,
        lens=lens,
        page_table=page_table,
        tiles=found.more.view(torch.int32).view(-1, TILE_FIELDS),
        token_slots=found.token_slots,
        places=found.places,
    )


def _tiles(
    slots: tuple[int, ...], starts: tuple[int, ...], lens: tuple[int, ...], group: int, block_m: int
) -> npt.NDArray[np.int32]:
    """[num_tiles, 8]: see kernels.TILE_FIELDS."""
    slot, start, length = (np.array(values, dtype=np.int64) for values in (slots, starts, lens))
    num_tiles = -(-length * group // block_m)  # [R]
    first_row = ranges(np.zeros_like(length), num_tiles) * block_m
    of_rows = np.stack([slot, start, length.cumsum() - length, length]).repeat(num_tiles, axis=1)
    tiles = np.zeros((len(first_row), TILE_FIELDS), dtype=np.int32)
    tiles[:, :4], tiles[:, 4] = of_rows.T, first_row
    # Long tiles first, so that no long one is left alone at the end.
    return tiles[np.argsort(-(of_rows[1] * group + first_row), kind="stable")]


def prefill_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: PrefillPlan,
    kv_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    *,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one layer, causal. The chunks' own K and V must be in the pool already.

    q: [T, nq, d], heads contiguous; kv: [places, nkv, 2 (k, v), d], contiguous, in q's type or
    float8_e4m3fn; kv_scale: [nkv, 2] float32, what stored keys and values are multiplied by; out:
    [T, nq, d], contiguous, made if not given; window: a token sees the last so many places, its own
    included, 0: all; sinks: [nq], the score of a place more that every token sees, and whose value is 0.
    Returns out. Scores are scaled by d ** -0.5.
    """
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if use_kernel(q):
        prefill_launch(q, kv, out, plan, kv_scale, window, sinks).run()
    else:
        out.copy_(prefill_attention_ref(q, kv, plan, kv_scale, window, sinks))
    return out


def prefill_attention_ref(
    q: torch.Tensor,
    kv: torch.Tensor,
    plan: PrefillPlan,
    kv_scale: torch.Tensor | None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """A chunk at a time, in float64 for float64 inputs and float32 otherwise."""
    out, token, size = torch.empty_like(q), 0, plan.shape.page_size
    for slot, start, length in zip(plan.slots, plan.starts, plan.lens, strict=True):
        positions = torch.arange(start + length, device=q.device)
        places = plan.page_table[slot, positions // size].to(torch.int64) * size + positions % size
        seen = last_seen(positions <= positions[start:, None], window)  # [length, start + length]
        own_q, scale = q[token : token + length], plan.shape.head_dim**-0.5
        result = attend(own_q, kv[places], seen, scale, kv_scale, sinks)
        out[token : token + length] = result.to(q.dtype)
        token += length
    return out


def prefill_launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    out: torch.Tensor,
    plan: PrefillPlan,
    kv_scale: torch.Tensor | None,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> Launch:
    from sgl_kernel.attention.prefill import kernels

    shape, config, head_dim = plan.shape, plan.config, plan.shape.head_dim
    assert q.stride()[1:] == (head_dim, 1) and kv.is_contiguous() and out.is_contiguous()
    assert kv_scale is None or kv_scale.shape == (shape.num_kv_heads, 2)
    assert sinks is None or (sinks.shape == (shape.num_heads,) and sinks.is_contiguous())
    return Launch(
        kernels.prefill_kernel,
        (plan.tiles.shape[0], shape.num_kv_heads),
        (
            q, out, kv, plan.tiles, plan.page_table, q if kv_scale is None else kv_scale,
            q if sinks is None else sinks, head_dim**-0.5 * math.log2(math.e), q.stride(0),
            plan.page_table.stride(0),
        ),
        {
            "G": shape.group,
            "NKV": shape.num_kv_heads,
            "D": head_dim,
            "PAGE": shape.page_size,
            "SCALED": kv_scale is not None,
            "WINDOW": window,
            "SINKS": sinks is not None,
            "BM": config.block_m,
            "BN": config.block_n,
            "BD": 1 << (head_dim - 1).bit_length(),
            "STAGES": config.num_stages,
            "CT": compute_type(q.dtype),
            "PDL": False,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
