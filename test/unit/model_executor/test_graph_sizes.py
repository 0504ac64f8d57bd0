"""For which batches graphs are captured. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.model_executor.graph_sizes import (
    LEAST_RAGGED_ROWS,
    MOST_RAGGED,
    RAGGED_SPACING,
    GraphKey,
    GraphSizes,
    default_sizes,
    plain_sizes,
    ragged_keys,
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


@given(num_steps=st.integers(1, 8), most=st.integers(1, 600))
def test_ragged_keys_are_few_and_of_sizes_that_there_are(num_steps: int, most: int) -> None:
    sizes = {draft_len: default_sizes(most) for draft_len in range(num_steps + 1)}
    keys = ragged_keys(sizes)
    assert len(keys) == len(set(keys)) <= MOST_RAGGED
    for key in keys:
        assert key.draft_len > 0 and key.rows >= LEAST_RAGGED_ROWS and key.rows in sizes[key.draft_len]
        assert key.rows < key.tokens < key.rows * (key.draft_len + 1), "some drafts, and not all"
    for draft_len in range(1, num_steps + 1):
        rows = sorted({key.rows for key in keys if key.draft_len == draft_len})
        assert most < LEAST_RAGGED_ROWS or rows[-1] == most, "the largest is there"
        assert all(above >= RAGGED_SPACING * below for below, above in zip(rows, rows[1:], strict=False))
    ragged = GraphSizes(sizes, pad=True, ragged=keys)
    assert sum(len(ragged.ragged_of(k)) for k in sizes) == len(keys)
    assert set(keys) <= set(ragged.capture_order(SpecShape(num_steps)))


def test_ragged_keys_of_a_usual_server() -> None:
    keys = ragged_keys({draft_len: default_sizes(256) for draft_len in range(4)})
    assert len(keys) == 112
    assert [key.tokens / key.rows for key in keys if key.rows == 64] == [1.5, 1.5, 2.0, 2.5, 2.0, 2.5, 3.0]
