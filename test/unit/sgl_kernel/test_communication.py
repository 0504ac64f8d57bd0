"""Sums over ranks by pushing: where things lie, what one kernel after the other makes of them in the
interpreter, that nothing is written over while it is still read, and compilation at real shapes.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.communication import layout as layout_module
from sgl_kernel.communication.layout import MAX_ROWS, PROGRAM_BYTES, ROW_BYTES, PushLayout
from sgl_kernel.communication.ops import PushSums, part_of, sum_ref
from sgl_kernel.norm.ops import rms_norm_ref
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret

BF16 = torch.bfloat16
MORE_COMPILED = ((2, BF16), (2, torch.float32), (8, torch.float32), (16, torch.float16))
LAYOUTS = st.builds(PushLayout, st.integers(2, 16), st.integers(1, 1 << 21), st.integers(1, 1 << 24))


@given(layout=LAYOUTS)
def test_places_lie_apart_and_in_the_block(layout: PushLayout) -> None:
    flags = layout.size * layout.programs * 4
    once = 2 * layout.size * layout.once_programs * PROGRAM_BYTES
    twice = 2 * layout.size * layout.twice_programs * PROGRAM_BYTES
    spans = [(layout.flags(step), flags) for step in range(4)]
    spans += [(layout.once_data, once), (layout.twice_parts, twice), (layout.twice_sums, twice)]
    spans += [(layout.row_data, 2 * layout.size * MAX_ROWS * ROW_BYTES)]
    for (begin, size), (after, _) in zip(spans, [*spans[1:], (layout.total_bytes, 0)], strict=True):
        assert begin + size <= after
    assert all(begin % 4096 == 0 for begin, _ in spans[4:])
    assert layout.once_programs * PROGRAM_BYTES >= layout.once_bytes


@given(layout=LAYOUTS, width=st.sampled_from([2, 4]), data=st.data())
def test_parts_cover_the_message_and_fit(layout: PushLayout, width: int, data: st.DataObject) -> None:
    numel = data.draw(st.integers(1, max(1, layout.twice_bytes // width)))
    part = part_of(numel, layout.size)
    assert part * layout.size >= numel and part % 16 == 0
    assert part * width <= layout.twice_programs * PROGRAM_BYTES


def random_parts(size: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(size, numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def interpreted_sums(size: int, dtype: str, twice: bool, residual: bool) -> None:
    """Ranks run one after the other and wait for nothing; when all have run often enough, all is there."""
    layout, kind = PushLayout(size, 1 << 15, 1 << 16), getattr(torch, dtype)
    blocks = [torch.zeros(layout.total_bytes + 4096, dtype=torch.uint8) for _ in range(size)]
    addresses = [-(-block.data_ptr() // 4096) * 4096 for block in blocks]
    ranks = [PushSums(rank, addresses, layout, torch.device("cpu")) for rank in range(size)]
    for turn, numel in enumerate((8, 3000, 16 * 321 + 5)):
        parts = random_parts(size, numel, kind, turn)
        stream = random_parts(1, numel, kind, 99)[0] if residual else None
        made: list[torch.Tensor] = []
        for _ in range(3 if twice else 2):
            made = []
            for rank, part in zip(ranks, parts, strict=True):
                rank.counters.fill_(turn)
                given = None if stream is None else stream.clone()
                made.append((rank.twice if twice else rank.once)(part.clone(), given))
                programs = -(-(part_of(numel, size) if twice else numel) * kind.itemsize // PROGRAM_BYTES)
                assert rank.counters[int(twice), :programs].eq(turn + 1).all()
                assert rank.counters[int(twice), programs:].eq(turn).all()
        wanted = sum_ref(parts, stream, twice=twice)
        # The interpreter truncates where it makes bfloat16.
        close = {"rtol": 2**-6, "atol": 2**-6} if kind == BF16 else {"rtol": 0.0, "atol": 0.0}
        for got in made:
            assert torch.equal(got, made[0]), "ranks get the same bytes"
            torch.testing.assert_close(got.float(), wanted.float(), **close)


def interpreted_rows(size: int, dtype: str) -> None:
    """Sums with their norm: the sum of ``once``, to the bit, and the norm of that."""
    layout, kind = PushLayout(size, 1 << 15, 1 << 16), getattr(torch, dtype)
    blocks = [torch.zeros(layout.total_bytes + 4096, dtype=torch.uint8) for _ in range(size)]
    addresses = [-(-block.data_ptr() // 4096) * 4096 for block in blocks]
    ranks = [PushSums(rank, addresses, layout, torch.device("cpu")) for rank in range(size)]
    for turn, (rows, columns) in enumerate([(1, 64), (5, 100), (2, 2048)]):
        parts = random_parts(size, rows * columns, kind, turn).view(size, rows, columns)
        stream, weight = (random_parts(1, n, kind, 98)[0] for n in (rows * columns, columns))
        made, sums = [], []
        for _ in range(2):
            made, sums = [], []
            for rank, part in zip(ranks, parts, strict=True):
                rank.counters.fill_(turn)
                made.append(rank.rows(part.clone(), stream.view(rows, columns).clone(), weight, 1e-5))
                sums.append(rank.once(part.clone(), stream.view(rows, columns).clone()))
        for (total, normed), summed in zip(made, sums, strict=True):
            assert torch.equal(total, summed), "the sum is that of once"
            assert torch.equal(total, made[0][0]) and torch.equal(normed, made[0][1])
            wanted = rms_norm_ref(total, weight, 1e-5, torch.empty_like(total))
            close = 2**-6 if kind == BF16 else 1e-6
            torch.testing.assert_close(normed.float(), wanted.float(), rtol=close, atol=close)


def all_sums() -> None:
    for twice in (False, True):
        interpreted_sums(3, "float32", twice, True)
    interpreted_rows(3, "float32")


def test_kernels_in_the_interpreter() -> None:
    interpret(__file__, "all_sums")


@pytest.mark.long
@pytest.mark.parametrize("size, dtype", [(2, "bfloat16"), (8, "float16")])
def test_more_rows_in_the_interpreter(size: int, dtype: str) -> None:
    interpret(__file__, "interpreted_rows", size=size, dtype=dtype)


def test_rows_that_are_too_many_or_too_long_are_not_taken() -> None:
    taken = [(1, 8192), (MAX_ROWS, 7168)]
    not_taken = [(0, 64), (MAX_ROWS + 1, 64), (1, 8256)]
    assert all(PushSums.takes_rows(torch.empty(shape, dtype=BF16)) for shape in taken)
    assert not any(PushSums.takes_rows(torch.empty(shape, dtype=BF16)) for shape in not_taken)


@pytest.mark.long
@pytest.mark.parametrize("size, dtype", [(2, "bfloat16"), (5, "float16"), (8, "float32")])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_more_kernels_in_the_interpreter(size: int, dtype: str, twice: bool, residual: bool) -> None:
    interpret(__file__, "interpreted_sums", size=size, dtype=dtype, twice=twice, residual=residual)


class World:
    """Ranks that make sums of one step, a program at a time, in any order that their flags allow."""

    def __init__(self, size: int, turns: int) -> None:
        self.size, self.turns = size, turns
        self.places: dict[tuple[int, int, int, int], int] = {}  # rank, program, turn, from -> which sum's
        self.flags: dict[tuple[int, int, int], int] = {}  # rank, program, from -> sums told of

    def program(self, rank: int, program: int, number: int, names: dict[int, int]) -> Iterator[bool]:
        """Yields whether it did something. ``names``: what this sum is, by its number for the program."""
        peers = [peer for peer in range(self.size) if peer != rank]
        for peer in peers:
            self.places[peer, program, number % self.turns, rank] = names[number]
            yield True
        for peer in peers:
            self.flags[peer, program, rank] = number
            yield True
        while any(self.flags.get((rank, program, peer), 0) < number for peer in peers):
            yield False
        for peer in peers:
            assert self.places[rank, program, number % self.turns, peer] == names[number], "written over"
            yield True

    def rank(self, rank: int, grids: list[int], rng: random.Random) -> Iterator[bool]:
        """One launch after the other; the programs of one in any order."""
        counters: dict[int, int] = {}
        names: dict[int, dict[int, int]] = {}
        for name, grid in enumerate(grids):
            running = []
            for program in range(grid):
                counters[program] = counters.get(program, 0) + 1
                names.setdefault(program, {})[counters[program]] = name
                running.append(self.program(rank, program, counters[program], names[program]))
            while running:
                one = rng.choice(running)
                try:
                    yield next(one)
                except StopIteration:
                    running.remove(one)


def run_world(size: int, turns: int, grids: list[int], seed: int) -> None:
    rng, world = random.Random(seed), World(size, turns)
    ranks = [world.rank(rank, grids, rng) for rank in range(size)]
    while ranks:
        one = rng.choice(ranks)
        try:
            for _ in range(rng.randint(1, 12)):
                next(one)
        except StopIteration:
            ranks.remove(one)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(2, 4),
    grids=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_nothing_is_written_over_before_it_is_read(size: int, grids: list[int], seed: int) -> None:
    run_world(size, layout_module.TURNS, grids, seed)


def test_one_turn_would_not_be_enough() -> None:
    with pytest.raises(AssertionError, match="written over"):
        for seed in range(200):
            run_world(3, 1, [2] * 6, seed)


@pytest.mark.parametrize(
    "size, dtype", [(8, BF16), *(pytest.param(n, d, marks=pytest.mark.long) for n, d in MORE_COMPILED)]
)
def test_kernels_compile_without_spills(size: int, dtype: torch.dtype) -> None:
    layout = PushLayout(size, 1 << 20, 8 << 20)
    sums = PushSums.__new__(PushSums)
    sums.rank, sums.layout = 1, layout
    sums.peers = torch.empty(size, dtype=torch.int64, device="meta")
    sums.counters = torch.empty(3, layout.programs, dtype=torch.int32, device="meta")
    x = torch.empty(4, 7168 if dtype.itemsize == 2 else 4096, dtype=dtype, device="meta")
    rows = sums.rows_launch(x, x, x, x[0], 1e-5)
    for launch in (sums.once_launch(x, x, x), sums.twice_launch(x, None, x), rows):
        for made in check(launch):
            stores = re.findall(r"st\.global\.(\S+) ", made.ptx)
            assert stores.count("v4.b32") >= 2 * (size - 1), "whole vectors over the links"
            # The data, then the flag; the flag, then the data.
            told, seen = made.ptx.index("st.release.sys"), made.ptx.index("ld.acquire.sys")
            assert made.ptx.index("st.global.v4") < told < seen < made.ptx.index("ld.global.cg.v4")
            assert "bar.sync" in made.ptx[:told] and "bar.sync" in made.ptx[seen:]
