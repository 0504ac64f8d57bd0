"""Decode attention in Triton's interpreter against its reference: plan, chunks, masks, merging.

A test is one process with several cases: starting it costs more than a case.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from helpers.paged_world import PagedWorld, paged_world

from sgl_kernel._dispatch import DeviceInfo
from sgl_kernel.attention import (
    AttentionShape,
    DecodePlan,
    DecodeWorkspace,
    View,
    decode_attention,
    plan_decode,
)
from sgl_kernel.attention.decode.reference import decode_attention_ref, plan_decode_ref
from sgl_kernel.testing.interpret import interpret

SHAPES = [(4, 1, 64, 1), (9, 3, 64, 16), (2, 2, 80, 3), (16, 1, 96, 1), (3, 1, 128, 64), (2, 1, 256, 1)]
SMALL = DeviceInfo(arch=120, num_sms=20)  # few programs: a row of 700 places is split, not more


def tree_mask(world: PagedWorld, num: int, extra: int) -> torch.Tensor:
    """[R, num, extra]: random, each query sees at least its own place at the end."""
    mask = torch.rand(len(world.slots), num, extra, generator=world.generator) < 0.4
    mask[:, :, extra - num :] |= torch.eye(num, dtype=torch.bool)
    return mask


def planned(world: PagedWorld, view: View, info: DeviceInfo, cap: int = 0) -> DecodePlan:
    """A plan by the kernel, equal to one by the reference."""
    workspace = DecodeWorkspace(world.shape, torch.device("cpu"), 4, info)
    args = (world.slots, world.base_lens, world.page_table, view)
    plan = plan_decode(workspace, *args, scratch_cap=cap)
    expected = DecodeWorkspace(world.shape, torch.device("cpu"), 4, info).plan(*args, cap)
    plan_decode_ref(expected)
    used = expected.items[:, 0] >= 0
    assert torch.equal(plan.items[:, 0], expected.items[:, 0])
    assert torch.equal(plan.items[used], expected.items[used])
    assert torch.equal(plan.bits, expected.bits)
    if view.writes:
        assert torch.equal(plan.places, expected.places)
    return plan


def compare(
    world: PagedWorld,
    view: View,
    cap: int = 0,
    info: DeviceInfo = SMALL,
    layers: int = 2,
    sinks: torch.Tensor | None = None,
) -> DecodePlan:
    """Several layers with one plan (counters must be back at zero); returns the plan."""
    plan = planned(world, view, info, cap)
    shape, tokens = world.shape, len(world.slots) * view.query_len
    kv = world.kv.clone()
    if view.writes and not view.scratch:
        own = world.slots.repeat_interleave(view.query_len) > 0
        kv[plan.places[own]] = world.draw(int(own.sum()), shape.num_kv_heads, 2, shape.head_dim)
    scratch = world.draw(len(world.slots), cap, shape.num_kv_heads, 2, shape.head_dim) if cap else None
    for _ in range(layers):
        q = world.draw(tokens, shape.num_heads + 3, shape.head_dim)[:, : shape.num_heads]
        got = decode_attention(q, kv, plan, scratch=scratch, sinks=sinks)
        expected = decode_attention_ref(q.contiguous(), kv, plan, None, scratch, sinks)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
        assert not plan.counters.any()
    return plan


def body_shapes() -> None:
    """Head sizes, groups and page sizes, one query."""
    for heads, kv_heads, dim, page in SHAPES:
        world = paged_world(AttentionShape(heads, kv_heads, dim, page), [33, 90, 0, 1], 4)
        compare(world, View(1, 1, causal=True), layers=1)


def body_queries() -> None:
    """Verify blocks: causal and trees, one tile and several."""
    world = paged_world(AttentionShape(6, 2, 64, 1), [70, 0, 140], 64)
    compare(world, View(4, 4, causal=True))
    compare(world, View(6, 6, mask=tree_mask(world, 6, 6)), layers=1)
    compare(world, View(3, 0), layers=1)
    world = paged_world(AttentionShape(4, 1, 64, 16), [60, 9], 64)
    compare(world, View(40, 40, causal=True), layers=1)
    compare(world, View(64, 64, mask=tree_mask(world, 64, 64)), layers=1)


def body_scratch() -> None:
    """Draft tree levels: up to 128 scratch places, in one and two words of mask bits."""
    world = paged_world(AttentionShape(4, 2, 64, 1), [50, 0, 120], 4)
    compare(world, View(4, 12, mask=tree_mask(world, 4, 12), scratch=True, write_start=8), cap=16, layers=1)
    compare(world, View(8, 80, mask=tree_mask(world, 8, 80), scratch=True, write_start=72), cap=96, layers=1)


def body_splits() -> None:
    """Rows of one chunk, of up to 16 (merged at once) and of more (merged in levels), together."""
    shape = AttentionShape(2, 1, 64, 1)
    world = paged_world(shape, [2500, 20, 0, 300], 4)
    plan = compare(world, View(2, 2, causal=True), layers=1)
    counts = plan.items[plan.items[:, 0] >= 0, 6]
    assert set(counts.tolist()) > {1} and counts.max() > 16
    world = paged_world(shape, [500, 130], 4)
    plan = compare(world, View(1, 1, causal=True))
    assert 1 < plan.items[:, 6].max() <= 16
    # 10 chunks by threes: three levels, with a group of one on each but the last.
    world = paged_world(AttentionShape(2, 2, 64, 1), [1250], 4)
    plan = planned(world, View(1), DeviceInfo(arch=120, num_sms=10))
    assert plan.items[:, 6].max() == 10
    plan = replace(plan, config=replace(plan.config, fan_in=3))
    q = world.draw(1, 2, 64)
    got, expected = decode_attention(q, world.kv, plan), decode_attention_ref(q, world.kv, plan, None, None)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)
    assert not plan.counters.any()
    # More rows than the wave has programs: nothing is split but what is far longer than the rest.
    world = paged_world(shape, [40] * 45 + [900], 4)
    plan = compare(world, View(1, 1, causal=True), layers=1)
    assert plan.items[plan.items[:, 0] == 45, 6].min() > 4 and plan.items[plan.items[:, 0] == 0, 6].max() == 1


def body_windows() -> None:
    """Windows within a chunk and over several, shorter and longer than a block of queries and a row."""
    world = paged_world(AttentionShape(4, 2, 64, 16), [300, 0, 20, 150], 8)
    sinks = torch.tensor([0.5, -2.0, 40.0, -1e4])
    plan = compare(world, View(1, 1, causal=True, window=128), layers=1, sinks=sinks)
    assert plan.items[:, 6].max() == 1, "a short window is one chunk"
    compare(world, View(4, 4, mask=tree_mask(world, 4, 4), window=2), layers=1, sinks=sinks.bfloat16())
    starts = torch.tensor([0, 1, 5, 7, 11])
    ragged = View(4, 4, causal=True, window=3, query_start=starts)
    plan = planned(world, ragged, SMALL)
    q, kv = world.draw(11, 4, 64), world.kv.clone()
    kv[plan.places] = world.draw(16, 2, 2, 64)
    got = decode_attention(q, kv, plan, sinks=sinks)
    expected = decode_attention_ref(q, kv, plan, None, None, sinks)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def body_wide_windows() -> None:
    """Windows of several chunks, and trees of two words of which a window cuts some off."""
    world = paged_world(AttentionShape(2, 2, 64, 1), [600, 9], 80)
    plan = compare(world, View(3, 3, causal=True, window=300), sinks=torch.tensor([0.5, -2.0]))
    assert plan.items[:, 6].max() > 1
    compare(world, View(6, 6, causal=True, window=3), layers=1)
    compare(world, View(64, 64, mask=tree_mask(world, 64, 64), window=9), layers=1)


def body_robust() -> None:
    """A plan made for longer rows serves shorter ones; a key of NaN breaks those who see it alone."""
    world = paged_world(AttentionShape(2, 1, 64, 1), [400, 300], 8)
    plan = compare(world, View(4, 4, causal=True))
    kv = world.kv.clone()
    world.base_lens.sub_(150)
    kv[plan.places] = 1.0  # the old places are in nobody's sight now
    own = torch.arange(4) + world.base_lens[:, None]
    places = world.page_table[world.slots[:, None], own].to(torch.int64)
    kv[places] = world.draw(2, 4, 1, 2, 64)
    kv[places[0, 2], :, 0] = torch.nan
    q = world.draw(8, 2, 64)
    got = decode_attention(q, kv, plan)
    broken = got.isnan().flatten(1).any(dim=1)
    assert broken.tolist() == [False, False, True, True] + [False] * 4
    expected = decode_attention_ref(q, kv, plan, None, None)
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5, equal_nan=True)


def body_fp8() -> None:
    """An e4m3 cache with scales for every KV head."""
    world = paged_world(AttentionShape(4, 2, 64, 1), [90, 33], 4)
    plan = planned(world, View(2, 2, causal=True), SMALL)
    kv = world.kv.clone()
    kv[plan.places] = world.draw(4, 2, 2, 64)
    stored = (kv * 20).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.05, 0.04], [0.06, 0.03]])
    q = world.draw(4, 4, 64)
    got = decode_attention(q, stored, plan, kv_scale=scale)
    torch.testing.assert_close(got, decode_attention_ref(q, stored, plan, scale, None), rtol=2e-5, atol=2e-5)


def body_all(names: list[str]) -> None:
    for name in names:
        globals()[f"body_{name}"]()


@pytest.mark.parametrize(
    "bodies",
    [
        ["shapes", "queries"],
        ["scratch", "robust", "fp8"],
        ["splits", "windows"],
        pytest.param(["wide_windows"], marks=pytest.mark.long),
    ],
    ids="-".join,
)
def test_kernel_equals_reference(bodies: list[str]) -> None:
    interpret(__file__, "body_all", names=bodies)
