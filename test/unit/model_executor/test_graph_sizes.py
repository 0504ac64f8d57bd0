"""For which batches graphs are captured. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

import pytest

from sglang.srt.model_executor.graph_sizes import (
    GraphKey,
    GraphSizes,
    default_sizes,
    plain_sizes,
    spec_sizes,
)
from sglang.srt.model_executor.step_plan import SpecShape


def test_the_ladder_is_that_of_upstream() -> None:
    assert default_sizes(256) == (1, 2, 4, 8, 12, *range(16, 257, 8))
    assert default_sizes(600) == (*default_sizes(256), *range(272, 512, 16), 512, 544, 576, 600)
    assert default_sizes(512)[-2:] == (496, 512)
    assert default_sizes(1) == (1,)
    assert default_sizes(5) == (1, 2, 4, 5)


@pytest.mark.parametrize(
    "num_slots, max_rows, given, sizes",
    [
        (1000, None, None, default_sizes(256)),
        (128, None, None, default_sizes(128)),
        (128, 500, None, default_sizes(128)),
        (1000, 300, None, default_sizes(300)),
        (128, None, (32, 1, 8, 8), (1, 8, 32)),
        (16, None, (1, 8, 32), (1, 8)),
        (128, 20, (1, 8, 32), (1, 8)),
        (4, None, (8, 16), (4,)),
    ],
)
def test_plain_sizes(
    num_slots: int, max_rows: int | None, given: tuple[int, ...] | None, sizes: tuple[int, ...]
) -> None:
    assert plain_sizes(num_slots, max_rows, given) == sizes


@pytest.mark.parametrize(
    "rows, given, sizes",
    [
        (20, None, (1, 2, 4, 8, 12, 16, 20)),
        (64, None, default_sizes(64)),
        (6, (1, 8), (1, 6)),
        (8, (1, 8), (1, 8)),
        (12, (1, 8), (1, 8, 12)),
    ],
)
def test_speculative_sizes_end_where_speculation_does(
    rows: int, given: tuple[int, ...] | None, sizes: tuple[int, ...]
) -> None:
    assert spec_sizes(rows, given) == sizes


def test_covering() -> None:
    sizes = GraphSizes({0: (1, 4, 8), 3: (2,)}, pad=True)
    found = [sizes.covering(0, rows) for rows in (1, 2, 4, 5, 8)]
    assert found == [GraphKey(0, rows) for rows in (1, 4, 4, 8, 8)]
    assert sizes.covering(3, 1) == sizes.covering(3, 2) == GraphKey(3, 2)
    assert sizes.covering(0, 9) is sizes.covering(3, 3) is sizes.covering(2, 1) is None
    exact = GraphSizes({0: (1, 4)}, pad=False)
    assert exact.covering(0, 4) == GraphKey(0, 4) and exact.covering(0, 3) is None


def test_the_largest_are_captured_first() -> None:
    sizes = GraphSizes({0: (1, 8), 2: (1, 4)}, pad=True)
    chain = [(key.draft_len, key.rows) for key in sizes.capture_order(SpecShape(2))]
    assert chain == [(2, 4), (0, 8), (2, 1), (0, 1)]
    assert [key.rows for key in GraphSizes({0: (1, 2, 4)}, pad=True).capture_order(None)] == [4, 2, 1]
    assert sizes.largest() == [GraphKey(0, 8), GraphKey(2, 4)] and sizes.max_rows == 8
