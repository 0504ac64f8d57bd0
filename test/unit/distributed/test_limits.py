"""Up to which size a sum goes which way.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.distributed.limits import Limits, choose_limits

WAYS = ("rows", "one", "two", "apart")


@st.composite
def tables(draw: st.DrawFn) -> dict[int, dict[str, float]]:
    """Sizes that double; each way but the last may be missing from a size on, one also up to a size."""
    sizes = [4096 << i for i in range(draw(st.integers(1, 7)))]
    ends = {way: draw(st.integers(0, len(sizes))) for way in WAYS[:-1]}
    begin = draw(st.integers(0, len(sizes)))
    table = {}
    for i, size in enumerate(sizes):
        there = [way for way in WAYS[:-1] if i < ends[way] and not (way == "two" and i < begin)]
        table[size] = {way: draw(st.floats(1, 100)) for way in (*there, "apart")}
    return table


def loss(table: dict[int, dict[str, float]], limits: Limits) -> float:
    return sum(of_way.get(limits.way(size), 1e9) / min(of_way.values()) for size, of_way in table.items())


@settings(max_examples=60, deadline=None)
@given(tables())
def test_limits_are_never_worse_than_one_way_for_all(table: dict[int, dict[str, float]]) -> None:
    limits = choose_limits(table, WAYS)
    assert all(limits.way(size) in of_way for size, of_way in table.items()), "only what can make the size"
    for i in range(len(WAYS)):
        one_way = Limits(WAYS, tuple([0] * i + [max(table)] * (len(WAYS) - 1 - i)))
        assert loss(table, limits) <= loss(table, one_way) + 1e-9
    assert list(limits.up_to) == sorted(limits.up_to)
    assert {limits.way(size) for size in (*table, 1 << 40)} == set(limits.used)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.tuples(*[st.integers(0, 4)] * 3),
    off=st.none() | st.integers(0, 13),
    slower=st.floats(1.05, 3.0),
)
def test_limits_are_where_the_ways_cross(
    lengths: tuple[int, int, int], off: int | None, slower: float
) -> None:
    """Also if one figure in the middle of others is off."""
    edges = [sum(lengths[: i + 1]) for i in range(3)]  # ways[i] is the fastest of sizes before edges[i]
    table = {}
    for i in range(14):
        fastest = next((way for way, edge in zip(WAYS, edges, strict=False) if i < edge), WAYS[-1])
        table[4096 << i] = {way: 1.0 if way == fastest else slower for way in WAYS}
        if i == off and all(abs(i - edge) > 2 for edge in (0, *edges, 14)):
            wrong = WAYS[(WAYS.index(fastest) + 1) % len(WAYS)]
            table[4096 << i] = {way: 1.0 for way in WAYS} | {fastest: 1.0 + 1.5 * (slower - 1), wrong: 1.0}
    limits = choose_limits(table, WAYS)
    assert limits.up_to == tuple(4096 << edge - 1 if edge else 0 for edge in edges)


def test_the_log_names_the_ways_that_are_used() -> None:
    names = {"once": "pushed in one step", "twice": "pushed in two", "nccl": "NCCL"}
    ways = tuple(names)
    assert Limits(ways, (1 << 20, 8 << 20)).text(names) == (
        "pushed in one step up to 1024 KiB, pushed in two up to 8192 KiB, else NCCL"
    )
    assert Limits(ways, (0, 1 << 20)).text(names) == "pushed in two up to 1024 KiB, else NCCL"
    assert Limits(ways, (4096, 4096)).text(names) == "pushed in one step up to 4 KiB, else NCCL"
    assert Limits(ways, (0, 0)).text(names) == "NCCL"
