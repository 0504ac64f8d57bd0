"""Attention of prefill chunks over a paged cache of latents: exact lengths on the host, any mixture of them.

Keys and values are made of the latents: 2 * R * (n + v) operations a head and place, beside 2 * (n + r + v) a
query that sees it, where attending to the latents themselves takes 2 * (2 * R + r). At Kimi's sizes (R 512, n
and v 128, r 64) that is 3.4 times as much, so the making pays from 171 queries on; of 8192 it is 5 %.

They are made for a *segment* of places at a time, whatever chunks these are of, so that they never take more
than ``SEGMENT_BYTES``; nothing is read back from the device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from sgl_kernel._dispatch import DeviceInfo, device_info, use_kernel
from sgl_kernel.attention.prefill.op import PrefillConfig
from sgl_kernel.attention.prefill.places import chunk_places
from sgl_kernel.launch import Launch, compute_type, next_power_of_2

SEGMENT_BYTES: Final = 256 << 20
TILE_FIELDS: Final = 8
"""First token, tokens, position of the first; first key in the segment, that key's position, keys; whether
it is the chunk's first segment, and its last."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    num_heads: int
    key_dim: int  # n
    rope_dim: int  # r
    value_dim: int  # v
    latent_dim: int  # R
    page_size: int


@dataclass(frozen=True, slots=True)
class Segment:
    """Keys ``begin … end - 1`` of a step, and the tiles that attend to some of them."""

    begin: int
    end: int
    first_tile: int
    end_tile: int


@dataclass(frozen=True, slots=True)
class LatentPrefillPlan:
    """What ``latent_prefill`` needs beside a layer's queries and latents."""

    shape: LatentShape
    config: PrefillConfig
    slots: tuple[int, ...]  # [C]
    starts: tuple[int, ...]  # [C] places in the cache before each chunk
    lens: tuple[int, ...]  # [C] tokens of each chunk
    page_table: torch.Tensor  # [slots, max_pages] int32
    token_slots: torch.Tensor  # [T] int64
    places: torch.Tensor  # [T] int64: where the chunks' own latents go
    key_places: torch.Tensor  # [S] int64: all that they see, whole pages, chunk by chunk
    tiles: torch.Tensor  # [num_tiles, 8] int32: see TILE_FIELDS
    segments: tuple[Segment, ...]


def latent_prefill_config(arch: int, shape: LatentShape) -> PrefillConfig:
    """Not measured yet: what fits, without spills."""
    is_wide = max(shape.key_dim, shape.value_dim) > 128
    if arch in (90, 100, 103):
        return PrefillConfig(64 if is_wide else 128, 64, 8, 2)
    return PrefillConfig(64, 16 if is_wide else 32, 8, 2)


def plan_latent_prefill(
    shape: LatentShape,
    page_table: torch.Tensor,
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    lens: tuple[int, ...],
    itemsize: int,
    info: DeviceInfo | None = None,
    segment_keys: int | None = None,
) -> LatentPrefillPlan:
    """Plan a step of C chunks: lens[c] tokens of slot slots[c] from position starts[c], flattened.

    itemsize: bytes of a number of keys and values; segment_keys: places of a segment, for tests.
    """
    config = latent_prefill_config((info or device_info(page_table.device)).arch, shape)
    if segment_keys is None:
        segment_keys = SEGMENT_BYTES // (shape.num_heads * (shape.key_dim + shape.value_dim) * itemsize)
    tiles, segments = _tiles(starts, lens, shape.page_size, config.block_m, max(segment_keys, 1))
    found = chunk_places(
        page_table,
        slots,
        starts,
        lens,
        shape.page_size,
        with_pages=True,
        more=tiles.reshape(-1).view(np.int64),
    )
    assert found.more is not None and found.page_ids is not None
    key_places = found.page_ids.to(torch.int64)
    if shape.page_size > 1:
        offsets = torch.arange(shape.page_size, device=key_places.device)
        key_places = (key_places[:, None] * shape.page_size + offsets).reshape(-1)
    return LatentPrefillPlan(
        shape=shape,
        config=config,
        slots=slots,
        starts=starts,
        lens=lens,
        page_table=page_table,
        token_slots=found.token_slots,
        places=found.places,
        key_places=key_places,
        tiles=found.more.view(torch.int32).view(-1, TILE_FIELDS),
        segments=segments,
    )


def _tiles(
    starts: tuple[int, ...], lens: tuple[int, ...], page_size: int, block_m: int, segment_keys: int
) -> tuple[npt.NDArray[np.int32], tuple[Segment, ...]]:
    """[num_tiles, 8], segment by segment. A chunk's keys are padded to whole pages."""
    keys = [start + length for start, length in zip(starts, lens, strict=True)]
    padded = [-(-count // page_size) * page_size for count in keys]
    ends = np.cumsum(padded)
    first_tokens = np.cumsum([0, *lens])
    tiles: list[npt.NDArray[np.int32]] = []
    segments: list[Segment] = []
    total, num_tiles = int(ends[-1]), 0
    for begin in range(0, total, segment_keys):
        end = min(begin + segment_keys, total)
        first_tile = num_tiles
        for chunk, (start, length, count) in enumerate(zip(starts, lens, keys, strict=True)):
            origin = int(ends[chunk]) - padded[chunk]
            low, high = max(begin - origin, 0), min(end - origin, count)  # keys of the chunk in the segment
            if low >= high:
                continue
            first = np.arange(0, length, block_m)
            made = np.empty((len(first), TILE_FIELDS), dtype=np.int32)
            made[:, 0] = first_tokens[chunk] + first
            made[:, 1] = np.minimum(block_m, length - first)
            made[:, 2] = start + first
            made[:, 3], made[:, 4], made[:, 5] = origin + low - begin, low, high - low
            made[:, 6], made[:, 7] = low == 0, high == count
            tiles.append(made[::-1])  # the longest first
            num_tiles += len(made)
        if num_tiles > first_tile:
            segments.append(Segment(begin, end, first_tile, num_tiles))
    return np.ascontiguousarray(np.concatenate(tiles)), tuple(segments)


def latent_prefill(
    q: torch.Tensor,
    latents: torch.Tensor,
    weight: torch.Tensor,
    plan: LatentPrefillPlan,
    scale: float,
    kv_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend one layer, causal. The chunks' own latents must be in the cache already.

    q: [T, nq, n + r], turned, heads contiguous; latents: [places, R + r], contiguous, in q's type or
    float8_e4m3fn; weight: [nq, n + v, R], contiguous: a head's key of a latent, then its value; scale: of the
    scores; kv_scale: [2] float32, what stored latents and turned keys are multiplied by. out: [T, nq, v],
    contiguous; made if not given. Returns it.
    """
    shape = plan.shape
    if out is None:
        out = q.new_empty(*q.shape[:2], shape.value_dim)
    if not use_kernel(q):
        return out.copy_(latent_prefill_ref(q, latents, weight, plan, scale, kv_scale))
    # Nothing is held where there is one segment; the kernel is the same.
    num_held = len(out) if len(plan.segments) > 1 else 0
    held = torch.empty(num_held, *out.shape[1:], dtype=torch.float32, device=out.device)
    stats = torch.empty(num_held, shape.num_heads, 2, dtype=torch.float32, device=out.device)
    for segment in plan.segments:
        seen = _gathered(latents, plan.key_places[segment.begin : segment.end], shape, q.dtype, kv_scale)
        kv = F.linear(seen[:, : shape.latent_dim], weight.flatten(0, 1))  # [S, nq * (n + v)]
        latent_prefill_launch(q, kv, seen, out, held, stats, plan, segment, scale).run()
    return out


def _gathered(
    latents: torch.Tensor,
    places: torch.Tensor,
    shape: LatentShape,
    dtype: torch.dtype,
    kv_scale: torch.Tensor | None,
) -> torch.Tensor:
    """[S, R + r] of ``dtype``."""
    if latents.dtype == dtype:
        return latents.index_select(0, places)
    stored = latents.view(torch.uint8).index_select(0, places).view(latents.dtype)
    if kv_scale is None:
        return stored.to(dtype)
    values, ropes = stored.float().split((shape.latent_dim, shape.rope_dim), dim=1)
    return torch.cat((values * kv_scale[0], ropes * kv_scale[1]), dim=1).to(dtype)


def latent_prefill_ref(
    q: torch.Tensor,
    latents: torch.Tensor,
    weight: torch.Tensor,
    plan: LatentPrefillPlan,
    scale: float,
    kv_scale: torch.Tensor | None,
) -> torch.Tensor:
    """A chunk at a time, in float64 for float64 inputs and float32 otherwise."""
    shape, token, size = plan.shape, 0, plan.shape.page_size
    compute = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = q.new_empty(*q.shape[:2], shape.value_dim)
    for slot, start, length in zip(plan.slots, plan.starts, plan.lens, strict=True):
        positions = torch.arange(start + length, device=q.device)
        places = plan.page_table[slot, positions // size].to(torch.int64) * size + positions % size
        own = _gathered(latents, places, shape, q.dtype, kv_scale)
        made = F.linear(own[:, : shape.latent_dim], weight.flatten(0, 1)).view(len(own), shape.num_heads, -1)
        made = made.to(compute)
        shared = own[:, None, shape.latent_dim :].expand(-1, shape.num_heads, -1)
        keys = torch.cat((made[..., : shape.key_dim], shared.to(compute)), dim=-1)
        scores = torch.einsum("qhd,nhd->hqn", q[token : token + length].to(compute), keys) * scale
        weights = scores.masked_fill(positions > positions[start:, None], -math.inf).softmax(-1)
        result = torch.einsum("hqn,nhd->qhd", weights, made[..., shape.key_dim :])
        out[token : token + length] = result.to(q.dtype)
        token += length
    return out


def latent_prefill_launch(
    q: torch.Tensor,
    kv: torch.Tensor,
    latents: torch.Tensor,
    out: torch.Tensor,
    held: torch.Tensor,
    stats: torch.Tensor,
    plan: LatentPrefillPlan,
    segment: Segment,
    scale: float,
) -> Launch:
    """kv: [S, nq * (n + v)]; latents: [S, R + r], of the segment's keys."""
    from sgl_kernel.attention.mla.prefilling.kernels import latent_prefill_kernel

    shape, config = plan.shape, plan.config
    assert q.stride()[1:] == (shape.key_dim + shape.rope_dim, 1) and out.is_contiguous()
    assert kv.is_contiguous() and latents.is_contiguous()
    return Launch(
        latent_prefill_kernel,
        (shape.num_heads, segment.end_tile - segment.first_tile),
        (
            q, kv, latents, out, held, stats, plan.tiles[segment.first_tile : segment.end_tile],
            scale * math.log2(math.e), q.stride(0), kv.stride(0), latents.stride(0),
        ),
        {
            "HEADS": shape.num_heads,
            "N": shape.key_dim,
            "ROPE": shape.rope_dim,
            "V": shape.value_dim,
            "R": shape.latent_dim,
            "BM": config.block_m,
            "BN": config.block_n,
            "BD": next_power_of_2(shape.key_dim),
            "BR": next_power_of_2(shape.rope_dim),
            "BV": next_power_of_2(shape.value_dim),
            "STAGES": config.num_stages,
            "CT": compute_type(q.dtype),
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip
