"""The references of the attention ops against loops in float64. No kernel runs here."""

from __future__ import annotations

import pytest
import torch
from helpers.attention_reference import attend_one
from helpers.paged_world import PagedWorld, paged_world, store_kv
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.attention import (
    AttentionShape,
    DecodeWorkspace,
    View,
    decode_attention,
    plan_decode,
    plan_prefill,
    prefill_attention,
)
from sgl_kernel.attention.decode.reference import row_chunks

SHAPE = AttentionShape(6, 2, 16, 4)


def base(world: PagedWorld, row: int, length: int) -> torch.Tensor:
    """[length, nkv, 2, d]: what the pool holds at the row's first places."""
    size = world.shape.page_size
    pages = world.page_table[world.slots[row]].to(torch.int64)
    position = torch.arange(length)
    return world.kv[pages[position // size] * size + position % size]


def seen_of(view: View, row: int, query: int, length: int) -> torch.Tensor:
    if view.causal:
        extra = torch.arange(view.extra) <= query
    else:
        extra = torch.zeros(0, dtype=torch.bool) if view.mask is None else view.mask[row, query]
    return torch.cat((torch.ones(length, dtype=torch.bool), extra))


@pytest.mark.parametrize("kind", ["none", "causal", "mask", "scratch"])
def test_decode(kind: str) -> None:
    world = paged_world(SHAPE, [9, 0, 30, 1], room=8)
    num, extra = 3, 5 if kind == "scratch" else 3
    mask = torch.rand(4, num, extra, generator=world.generator) < 0.5
    view = {
        "none": View(num),
        "causal": View(num, extra, causal=True),
        "mask": View(num, extra, mask=mask),
        "scratch": View(num, extra, mask=mask, scratch=True, write_start=2),
    }[kind]
    cap = 7 if kind == "scratch" else 0
    workspace = DecodeWorkspace(SHAPE, torch.device("cpu"), 4)
    plan = plan_decode(workspace, world.slots, world.base_lens, world.page_table, view, cap)
    new = world.draw(4, num, 2, 2, 16)  # [R, Q, nkv, 2, d]
    scratch = world.draw(4, cap, 2, 2, 16)
    if view.writes:
        target = scratch.flatten(0, 1) if view.scratch else world.kv
        both = new.flatten(0, 1)
        store_kv(both[:, :, 0], both[:, :, 1], target, plan.places)
    q = world.draw(4 * num, 6, 16)
    got = decode_attention(q, world.kv, plan, scratch=scratch if view.scratch else None).view(4, num, 6, 16)
    assert not got[1].any()
    for row in (0, 2, 3):
        length = int(world.base_lens[row])
        own = scratch[row, :extra] if view.scratch else new[row] if view.writes else new[row, :0]
        assert not view.scratch or torch.equal(scratch[row, 2:5], new[row])
        k, v = torch.cat((base(world, row, length), own)).unbind(2)
        for i in range(num):
            expected = attend_one(q[row * num + i], k, v, seen_of(view, row, i, length))
            torch.testing.assert_close(got[row, i].double(), expected, rtol=1e-5, atol=1e-5)


def test_prefill() -> None:
    world = paged_world(SHAPE, [9, 30, 12], room=20)
    starts, lens = (0, 30, 12), (17, 1, 6)
    plan = plan_prefill(SHAPE, world.page_table, tuple(world.slots.tolist()), starts, lens, 4)
    k, v, q = world.draw(24, 2, 16), world.draw(24, 2, 16), world.draw(24, 6, 16)
    store_kv(k, v, world.kv, plan.places)
    got, token = prefill_attention(q, world.kv, plan), 0
    for row, (start, length) in enumerate(zip(starts, lens, strict=True)):
        all_k, all_v = base(world, row, start + length).unbind(2)
        assert torch.equal(all_k[start:], k[token : token + length])
        for i in range(length):
            seen = torch.arange(start + length) <= start + i
            expected = attend_one(q[token], all_k, all_v, seen)
            torch.testing.assert_close(got[token].double(), expected, rtol=1e-5, atol=1e-5)
            token += 1


def test_fp8_cache() -> None:
    """Stored divided by the scales, read multiplied; what is too large becomes 448 times the scale."""
    world = paged_world(AttentionShape(2, 2, 16, 4), [8], room=4)
    kv = torch.zeros(world.kv.shape).to(torch.float8_e4m3fn)
    scale = torch.tensor([[0.5, 0.25], [0.1, 2.0]])
    plan = plan_prefill(world.shape, world.page_table, (int(world.slots[0]),), (0,), (8,), 1)
    k, v, q = world.draw(8, 2, 16), world.draw(8, 2, 16), world.draw(8, 2, 16)
    v[3, 0, 5] = 1e4
    store_kv(k, v, kv, plan.places, scale)
    stored = kv.float()[plan.places] * scale[:, :, None]
    assert stored[3, 0, 1, 5] == 448 * 0.25
    v[3, 0, 5] = 448 * 0.25
    torch.testing.assert_close(stored[:, :, 0], k, rtol=0.07, atol=0.01)
    torch.testing.assert_close(stored[:, :, 1], v, rtol=0.07, atol=0.01)
    got = prefill_attention(q, kv, plan, scale)
    expected = attend_one(q[7], *stored.unbind(2), torch.ones(8, dtype=torch.bool))
    torch.testing.assert_close(got[7].double(), expected, rtol=1e-5, atol=1e-5)


def test_a_value_that_is_not_finite_breaks_only_those_who_see_it() -> None:
    world = paged_world(AttentionShape(2, 1, 16, 1), [5], room=4)
    view = View(3, 3, causal=True)
    workspace = DecodeWorkspace(world.shape, torch.device("cpu"), 4)
    plan = plan_decode(workspace, world.slots, world.base_lens, world.page_table, view)
    for bad in (torch.nan, torch.inf):
        k, v = world.draw(3, 1, 16), world.draw(3, 1, 16)
        v[1, 0, 7] = bad
        store_kv(k, v, world.kv, plan.places)
        assert world.kv[plan.places][:, :, 1].isfinite().all()
        got = decode_attention(world.draw(3, 2, 16), world.kv, plan)
        assert got.isnan().flatten(1).all(dim=1).tolist() == [False, True, True]
        assert got[0].isfinite().all()


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=20), st.integers(0, 60), st.integers(1, 300))
def test_chunks_fill_the_budget(lens: list[int], spare: int, min_chunk: int) -> None:
    """Never more chunks than programs; and a chunk one unit shorter would not have fitted."""
    budget = len(lens) + spare
    counts = row_chunks(lens, budget, min_chunk)
    assert sum(counts) <= budget and min(counts) >= 1
    if max(counts) == 1:
        return
    shortest = next(u for u in range(1, 400) if [max(1, -(-x // (16 * u))) for x in lens] == counts)
    if 16 * shortest > min_chunk + 15:
        assert sum(max(1, -(-x // (16 * (shortest - 1)))) for x in lens) > budget


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 64), st.sampled_from([(32, 8), (9, 3), (16, 16), (64, 1), (14, 2)])
)
def test_partials_never_run_out(num_rows: int, query_len: int, heads: tuple[int, int]) -> None:
    """One row far longer than the others takes all spare items; all must have room for their partials."""
    workspace = DecodeWorkspace(AttentionShape(*heads, 128, 1), torch.device("meta"), 2)
    items, partials = workspace.sizes(num_rows, query_len)
    for lens in ([20_000] + [10] * (num_rows - 1), [900] * num_rows, [2000, 1100] * num_rows):
        counts = row_chunks(lens[:num_rows], items // heads[1], 128)
        assert sum(counts) * heads[1] <= items
        assert sum(count for count in counts if count > 1) * heads[1] <= partials
