"""Prefill over latents: the kernel against its reference, chunk by chunk and segment by segment."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="kernels need triton")

from sgl_kernel._dispatch import H200, RTX_PRO_6000, DeviceInfo
from sgl_kernel.attention.mla.prefilling import op
from sgl_kernel.attention.mla.prefilling.op import (
    LatentShape,
    Segment,
    latent_prefill,
    latent_prefill_launch,
    latent_prefill_ref,
    plan_latent_prefill,
)
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret


def compare(shape: LatentShape, starts: list[int], lens: list[int], segment_keys: int, seed: int = 0) -> int:
    """By the kernel and by the reference; returns how many segments there were. Unwritten places are NaN."""
    generator = torch.Generator().manual_seed(seed)
    size, width = shape.page_size, shape.latent_dim + shape.rope_dim
    pages = -(-max(a + b for a, b in zip(starts, lens, strict=True)) // size)
    table = torch.randperm((len(lens) + 1) * pages, generator=generator).to(torch.int32).view(-1, pages) + 1
    latents = torch.full((((len(lens) + 1) * pages + 1) * size, width), torch.nan)
    slots = tuple(range(1, len(lens) + 1))
    for slot, start, length in zip(slots, starts, lens, strict=True):
        positions = torch.arange(start + length)
        places = table[slot, positions // size].to(torch.int64) * size + positions % size
        latents[places] = torch.randn(len(places), width, generator=generator)
    weight = torch.randn(
        shape.num_heads, shape.key_dim + shape.value_dim, shape.latent_dim, generator=generator
    )
    q = torch.randn(sum(lens), shape.num_heads, shape.key_dim + shape.rope_dim, generator=generator)
    plan = plan_latent_prefill(
        shape, table, slots, tuple(starts), tuple(lens), 4, RTX_PRO_6000, segment_keys=segment_keys
    )
    got = latent_prefill(q, latents, weight, plan, 0.1)
    torch.testing.assert_close(
        got, latent_prefill_ref(q, latents, weight, plan, 0.1, None), rtol=2e-5, atol=2e-5
    )
    return len(plan.segments)


def body_numerics() -> None:
    small = LatentShape(2, 20, 12, 24, 32, 4)
    assert compare(small, [37, 5], [3, 1], 10_000) == 1
    assert compare(small, [40, 0], [66, 9], 48) == 3  # whole segments behind some queries, and across chunks
    assert compare(LatentShape(1, 16, 16, 16, 16, 1), [0], [5], 2) == 3


def test_numerics() -> None:
    interpret(__file__, "body_numerics")


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 90)), min_size=1, max_size=4),
    st.integers(1, 70),
    st.sampled_from([1, 4, 16]),
)
def test_every_query_meets_every_key_once(
    chunks: list[tuple[int, int]], segment_keys: int, page_size: int
) -> None:
    starts, lens = zip(*chunks, strict=True)
    tiles, segments = op._tiles(starts, lens, page_size, 32, segment_keys)
    origins = np.cumsum([0, *(-(-(a + b) // page_size) * page_size for a, b in chunks)])
    met = [np.zeros((length, start + length), dtype=int) for start, length in chunks]
    firsts, lasts, held = np.zeros(sum(lens), int), np.zeros(sum(lens), int), np.zeros(sum(lens), bool)
    first_tokens = np.cumsum([0, *lens])
    for segment in segments:
        assert 0 < segment.end - segment.begin <= segment_keys
        for token, num, position, key, key_position, keys, is_first, is_last in tiles[
            segment.first_tile : segment.end_tile
        ]:
            chunk = int(np.searchsorted(first_tokens, token, side="right")) - 1
            query = token - first_tokens[chunk]
            assert position == starts[chunk] + query
            assert (
                segment.begin + key == origins[chunk] + key_position
                and key + keys <= segment.end - segment.begin
            )
            met[chunk][query : query + num, key_position : key_position + keys] += 1
            assert (held[token : token + num] != is_first).all(), "sums are there, or begin here"
            held[token : token + num] = not is_last
            firsts[token : token + num] += is_first
            lasts[token : token + num] += is_last
    assert all((of_chunk == 1).all() for of_chunk in met) and (firsts == 1).all() and (lasts == 1).all()


@pytest.mark.parametrize("info", [H200, RTX_PRO_6000], ids=lambda info: f"sm_{info.arch}")
@pytest.mark.parametrize("nope, v", [(128, 128), pytest.param(192, 256, marks=pytest.mark.long)])
def test_fits(nope: int, v: int, info: DeviceInfo) -> None:
    heads, rope, rank, num_keys, tokens = 8, 64, 512, 4096, 2048

    def meta(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    shape = LatentShape(heads, nope, rope, v, rank, 1)
    table = torch.zeros(2, 4096, dtype=torch.int32)
    plan = plan_latent_prefill(shape, table, (1,), (2048,), (tokens,), 2, info)
    plan = replace(plan, tiles=meta(*plan.tiles.shape, dtype=torch.int32))
    launch = latent_prefill_launch(
        meta(tokens, heads, nope + rope),
        meta(num_keys, heads * (nope + v)),
        meta(num_keys, rank + rope),
        meta(tokens, heads, v),
        meta(tokens, heads, v, dtype=torch.float32),
        meta(tokens, heads, 2, dtype=torch.float32),
        plan,
        Segment(0, num_keys, 0, len(plan.tiles)),
        0.1,
    )
    (made,) = check(launch, archs=(info.arch,))
    print(f"{nope} {v} sm_{info.arch}: {made.shared} bytes, {made.registers} registers")
