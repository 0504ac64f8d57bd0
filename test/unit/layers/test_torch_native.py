"""torch_native attention against loops in float64, with NaN wherever a row must not look."""

from __future__ import annotations

from unittest.mock import patch

import torch
from helpers.attention_reference import attend_one, random_page_table
from helpers.products import product_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.layers.attention import rows as row_places
from sglang.srt.layers.attention.base import Block, DecodeRows, PrefillRows, ScratchRows
from sglang.srt.layers.attention.heads import Scope
from sglang.srt.layers.attention.torch_native import TorchNativeAttention
from sglang.srt.mem_cache.kv_pool import MHAKVPool

NUM_LAYERS, NKV, GROUP, D = 2, 2, 3, 8
NUM_SLOTS, MAX_LEN = 6, 48
NQ = NKV * GROUP
LAYER = 1


class World:
    """A pool of NaN with the first ``lens[slot]`` places of each slot filled."""

    def __init__(
        self, seed: int, page_size: int, lens: list[int], dtype: torch.dtype = torch.float64
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        max_pages = -(-MAX_LEN // page_size)
        num_pages = NUM_SLOTS * max_pages
        self.pool = MHAKVPool(NUM_LAYERS, num_pages, page_size, NKV, D, dtype, "cpu")
        self.pool.poison(range(1, num_pages + 1))
        table = random_page_table(NUM_SLOTS, max_pages, num_pages, self.generator)
        self.backend = TorchNativeAttention(self.pool, table)
        self.dtype = dtype
        self.history: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # slot -> k, v [len, nkv, d]
        for slot, length in enumerate(lens, start=1):
            k, v = self.draw(length, NKV), self.draw(length, NKV)
            positions = torch.arange(length)
            self.pool.write(LAYER, self.backend.places(torch.full((length,), slot), positions), k, v)
            self.history[slot] = (k, v)

    def draw(self, num: int, heads: int) -> torch.Tensor:
        return torch.randn(num, heads, D, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def slots(self, num: int) -> torch.Tensor:
        """``num`` distinct slots in random order."""
        return torch.randperm(len(self.history), generator=self.generator)[:num] + 1

    def base_lens(self, slots: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.history[int(s)][0].shape[0] for s in slots])


def close(got: torch.Tensor, expected: list[torch.Tensor], tolerance: float = 1e-10) -> None:
    assert torch.isfinite(got).all()
    assert torch.allclose(got.double(), torch.stack(expected), rtol=tolerance, atol=tolerance)


def tree_mask(num_rows: int, num_nodes: int, generator: torch.Generator) -> torch.Tensor:
    """[R, N, N] ancestor-or-self of random trees whose parents come before their children."""
    mask = torch.eye(num_nodes, dtype=torch.bool).repeat(num_rows, 1, 1)
    for r in range(num_rows):
        for i in range(1, num_nodes):
            parent = int(torch.randint(0, i, (), generator=generator))
            mask[r, i] |= mask[r, parent]
    return mask


def block_seen(block: Block, mask: torch.Tensor | None, row: int, query: int, num: int) -> torch.Tensor:
    if block is Block.TREE:
        assert mask is not None
        return mask[row, query]
    return torch.arange(num) <= query


def draw_sinks(seed: int) -> torch.Tensor:
    return torch.randn(NQ, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def within(scope: Scope, seen: torch.Tensor, positions: torch.Tensor, own: int) -> torch.Tensor:
    """Of the places seen, those whose positions lie in the window of a query at position ``own``."""
    return seen if scope.window is None else seen & (own - positions < scope.window)


worlds = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "page_size": st.sampled_from([1, 3, 16]),
        "lens": st.lists(st.integers(1, 30), min_size=1, max_size=NUM_SLOTS),
    }
)
scopes = st.builds(
    lambda window, seed: Scope(window, None if seed is None else 2.0 * draw_sinks(seed)),
    st.sampled_from([None, None, 1, 3, 12]),
    st.sampled_from([None, None, 1, 2]),
)
short_rows = st.sampled_from([1, 64])  # 1: rows of different lengths are taken apart


def test_large_results_in_half_precision_are_finite() -> None:
    """Their sum is not, in half precision: no row may be taken for one that a draft has broken."""
    pool = MHAKVPool(1, 200, 1, NKV, D, torch.float16, "cpu")
    pool.kv.fill_(100)
    backend = TorchNativeAttention(pool, torch.arange(200, dtype=torch.int32).view(2, 100))
    q, kv = torch.ones(64, NQ, D).half(), torch.full((64, NKV, D), 100).half()
    with patch.object(row_places, "_attend_apart", side_effect=AssertionError):
        out = backend.decode(DecodeRows(torch.tensor([1]), torch.tensor([30]), 30, 64))(
            0, product_of(q, kv, kv)
        )
    assert (out == 100).all()


def test_a_long_row_does_not_make_its_neighbours_long() -> None:
    """Padding all rows to the longest cost 20 times the time, and memory that no budget knows of."""
    pool = MHAKVPool(1, 3000, 1, NKV, D, torch.float32, "cpu")
    pool.kv.zero_()
    backend = TorchNativeAttention(pool, torch.ones(33, 2100, dtype=torch.int32))
    lens = torch.tensor([2000, *range(70, 101)])
    q, kv = torch.randn(32, NQ, D), torch.randn(32, NKV, D)
    backend.decode(DecodeRows(torch.arange(1, 33), lens, 2000, 1))(0, product_of(q, kv, kv))
    assert backend._gathered.shape[0] < 1.5 * int(lens.sum())


@settings(max_examples=60, deadline=None)
@given(worlds, st.sampled_from([Block.CAUSAL, Block.TREE]), st.integers(1, 7), short_rows, scopes)
def test_decode_and_verify(
    world_args: dict[str, object], block: Block, num_queries: int, short_row: int, scope: Scope
) -> None:
    world = World(**world_args)  # type: ignore[arg-type]
    slots = world.slots(len(world.history))
    lens = world.base_lens(slots)
    mask = tree_mask(len(slots), num_queries, world.generator) if block is Block.TREE else None
    num = len(slots) * num_queries
    q, k, v = world.draw(num, NQ), world.draw(num, NKV), world.draw(num, NKV)
    rows = DecodeRows(slots, lens, int(lens.max()) + 3, num_queries, block, mask)
    with patch.object(row_places, "SHORT_ROW", short_row):
        got = world.backend.decode(rows)(LAYER, product_of(q, k, v, scope))
    expected = []
    for r, slot in enumerate(slots.tolist()):
        own = slice(r * num_queries, (r + 1) * num_queries)
        base_k, base_v = world.history[slot]
        all_k, all_v = torch.cat((base_k, k[own])), torch.cat((base_v, v[own]))
        for i in range(num_queries):
            seen_base = torch.ones(base_k.shape[0], dtype=torch.bool)
            seen = torch.cat((seen_base, block_seen(block, mask, r, i, num_queries)))
            depths = [int(block_seen(block, mask, r, j, num_queries).sum()) - 1 for j in range(num_queries)]
            positions = torch.cat((torch.arange(int(lens[r])), lens[r] + torch.tensor(depths)))
            seen = within(scope, seen, positions, int(lens[r]) + depths[i])
            expected.append(attend_one(q[own][i], all_k, all_v, seen, scope.sinks))
        places = world.backend.places(torch.full((num_queries,), slot), lens[r] + torch.arange(num_queries))
        assert torch.equal(world.pool.keys(LAYER)[places], k[own])
        assert torch.equal(world.pool.values(LAYER)[places], v[own])
    close(got, expected)


@settings(max_examples=30, deadline=None)
@given(worlds, st.integers(1, 3), short_rows)
def test_block_none_writes_nothing(world_args: dict[str, object], num_queries: int, short_row: int) -> None:
    world = World(**world_args)  # type: ignore[arg-type]
    slots = world.slots(len(world.history))
    lens = world.base_lens(slots)
    before = world.pool.kv.clone()
    q = world.draw(len(slots) * num_queries, NQ)
    rows = DecodeRows(slots, lens, int(lens.max()), num_queries, Block.NONE)
    with patch.object(row_places, "SHORT_ROW", short_row):
        got = world.backend.decode(rows)(LAYER, product_of(q))
    assert torch.equal(world.pool.kv.nan_to_num(7.0), before.nan_to_num(7.0))
    expected = []
    for t in range(q.shape[0]):
        k, v = world.history[int(slots[t // num_queries])]
        expected.append(attend_one(q[t], k, v, torch.ones(k.shape[0], dtype=torch.bool)))
    close(got, expected)


@settings(max_examples=40, deadline=None)
@given(worlds, st.lists(st.integers(1, 12), min_size=NUM_SLOTS, max_size=NUM_SLOTS), st.data(), scopes)
def test_prefill_of_first_and_later_chunks(
    world_args: dict[str, object], lengths: list[int], data: st.DataObject, scope: Scope
) -> None:
    world = World(**world_args)  # type: ignore[arg-type]
    slots = world.slots(len(world.history)).tolist()
    starts = [data.draw(st.sampled_from([0, world.history[s][0].shape[0]])) for s in slots]
    lengths = lengths[: len(slots)]
    rows = PrefillRows(tuple(slots), tuple(starts), tuple(lengths))
    total = sum(lengths)
    q, k, v = world.draw(total, NQ), world.draw(total, NKV), world.draw(total, NKV)
    got = world.backend.prefill(rows)(LAYER, product_of(q, k, v, scope))
    close(got, _prefill_reference(world, rows, q, k, v, scope))
    begin = 0
    for slot, start, length in zip(slots, starts, lengths, strict=True):
        places = world.backend.places(torch.full((length,), slot), start + torch.arange(length))
        assert torch.equal(world.pool.keys(LAYER)[places], k[begin : begin + length])
        begin += length


def _prefill_reference(
    world: World, rows: PrefillRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scope: Scope
) -> list[torch.Tensor]:
    expected, begin = [], 0
    for slot, start, length in zip(rows.slots, rows.starts, rows.query_lens, strict=True):
        own = slice(begin, begin + length)
        base_k, base_v = world.history[slot]
        all_k, all_v = torch.cat((base_k[:start], k[own])), torch.cat((base_v[:start], v[own]))
        for i in range(length):
            positions = torch.arange(start + length)
            seen = within(scope, positions <= start + i, positions, start + i)
            expected.append(attend_one(q[own][i], all_k, all_v, seen, scope.sinks))
        begin += length
    return expected


@settings(max_examples=20, deadline=None)
@given(worlds, st.integers(1, 9), scopes)
def test_mixed(world_args: dict[str, object], length: int, scope: Scope) -> None:
    world = World(**world_args)  # type: ignore[arg-type]
    slots = world.slots(len(world.history))
    decoding, chunk_slot = slots[1:], int(slots[0])
    if len(decoding) == 0:
        return
    lens, n = world.base_lens(decoding), len(decoding)
    start = world.history[chunk_slot][0].shape[0]
    decode = DecodeRows(decoding, lens, int(lens.max()), 1)
    chunk = PrefillRows((chunk_slot,), (start,), (length,))
    q, k, v = world.draw(n + length, NQ), world.draw(n + length, NKV), world.draw(n + length, NKV)
    got = world.backend.mixed(decode, chunk)(LAYER, product_of(q, k, v, scope))
    expected = []
    for r, slot in enumerate(decoding.tolist()):
        all_k = torch.cat((world.history[slot][0], k[r : r + 1]))
        all_v = torch.cat((world.history[slot][1], v[r : r + 1]))
        positions = torch.arange(all_k.shape[0])
        seen = within(scope, positions >= 0, positions, int(lens[r]))
        expected.append(attend_one(q[r], all_k, all_v, seen, scope.sinks))
    close(got, expected + _prefill_reference(world, chunk, q[n:], k[n:], v[n:], scope))


@settings(max_examples=30, deadline=None)
@given(worlds, st.integers(1, 4), st.integers(1, 4))
def test_scratch_levels(world_args: dict[str, object], width: int, levels: int) -> None:
    """Levels of a draft tree: each query sees the base, itself and a random path of earlier places."""
    world = World(**world_args)  # type: ignore[arg-type]
    slots = world.slots(len(world.history))
    lens, n = world.base_lens(slots), len(slots)
    before = world.pool.kv.clone()
    scratch_k = torch.empty(n, 0, NKV, D, dtype=torch.float64)
    scratch_v = torch.empty(n, 0, NKV, D, dtype=torch.float64)
    for level in range(levels):
        start = level * width
        mask = torch.rand(n, width, start + width, generator=world.generator) < 0.5
        mask[:, :, start:] = torch.eye(width, dtype=torch.bool)
        q, k, v = world.draw(n * width, NQ), world.draw(n * width, NKV), world.draw(n * width, NKV)
        rows = ScratchRows(slots, lens, int(lens.max()), width, start, mask)
        got = world.backend.scratch(rows)(LAYER, product_of(q, k, v))
        scratch_k = torch.cat((scratch_k, k.view(n, width, NKV, D)), 1)
        scratch_v = torch.cat((scratch_v, v.view(n, width, NKV, D)), 1)
        expected = []
        for r, slot in enumerate(slots.tolist()):
            base_k, base_v = world.history[slot]
            all_k, all_v = torch.cat((base_k, scratch_k[r])), torch.cat((base_v, scratch_v[r]))
            for i in range(width):
                seen = torch.cat((torch.ones(base_k.shape[0], dtype=torch.bool), mask[r, i]))
                expected.append(attend_one(q[r * width + i], all_k, all_v, seen))
        close(got, expected)
    assert torch.equal(world.pool.kv.nan_to_num(7.0), before.nan_to_num(7.0))


def test_float32_and_padded_rows() -> None:
    """Padded rows share slot 0 and length 1; they must stay finite and disturb nobody."""
    world = World(3, 4, [5, 9], torch.float32)
    slots, lens = torch.tensor([2, 0, 0]), torch.tensor([9, 1, 1])
    q, k, v = world.draw(3, NQ), world.draw(3, NKV), world.draw(3, NKV)
    got = world.backend.decode(DecodeRows(slots, lens, 9, 1))(LAYER, product_of(q, k, v))
    base_k, base_v = world.history[2]
    all_k, all_v = torch.cat((base_k, k[:1])), torch.cat((base_v, v[:1]))
    close(got[:1], [attend_one(q[0], all_k, all_v, torch.ones(10, dtype=torch.bool))], 1e-5)
    assert torch.isfinite(got).all()
    first_k, _ = world.history[1]
    places = world.backend.places(torch.ones(5, dtype=torch.int64), torch.arange(5))
    assert torch.equal(world.pool.keys(LAYER)[places], first_k)


def test_places_follow_the_page_table() -> None:
    world = World(0, 4, [1])
    table = world.backend.page_table
    slots, positions = torch.tensor([[1, 1], [3, 0]]), torch.tensor([[0, 7], [13, 2]])
    got = world.backend.places(slots, positions)
    assert got.dtype == torch.int64 and got.shape == (2, 2)
    assert got[0, 1] == table[1, 1] * 4 + 3 and got[1, 0] == table[3, 3] * 4 + 1 and got[1, 1] == 2
