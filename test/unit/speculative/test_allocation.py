"""Who gets a step's drafts: as many accepted as any allocation reaches."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.speculative.allocation import Sharing

CHANCES = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).map(lambda parts: sorted(parts, reverse=True))
ROWS = st.lists(CHANCES, min_size=1, max_size=4).map(np.array)  # [R, 3]


@settings(max_examples=60)
@given(reached=ROWS, longest=st.integers(1, 3), data=st.data())
def test_no_allocation_is_expected_to_accept_more(
    reached: np.ndarray, longest: int, data: st.DataObject
) -> None:
    num_drafts = data.draw(st.integers(0, longest * len(reached)))
    sharing = Sharing(reached)
    drafts = sharing.drafts(longest, num_drafts)
    assert len(drafts) == len(reached) and sum(drafts) == num_drafts and max(drafts) <= longest

    def accepted(lens: tuple[int, ...]) -> float:
        return float(sum(row[:k].sum() for row, k in zip(reached, lens, strict=True)))

    every = product(range(longest + 1), repeat=len(reached))
    best = max(accepted(lens) for lens in every if sum(lens) == num_drafts)
    assert accepted(drafts) == pytest.approx(best, abs=1e-3), "chances are told apart to 16 bits"
    assert sharing.accepted(longest, num_drafts) == pytest.approx(accepted(drafts))
    assert sharing.extra_tokens()[longest] == pytest.approx(sharing.accepted(longest, longest * len(reached)))


@given(reached=ROWS, data=st.data())
def test_rows_that_are_due_are_first(reached: np.ndarray, data: st.DataObject) -> None:
    due = np.array(data.draw(st.lists(st.booleans(), min_size=len(reached), max_size=len(reached))))
    count = int(due.sum())
    sharing = Sharing(reached, due)
    assert sharing.drafts(3, count) == tuple(due.astype(int))
    assert sharing.accepted(3, count) == pytest.approx(float(reached[due, 0].sum())), "by its true chance"


def test_rows_that_are_alike_differ_by_one_at_most() -> None:
    code, chat = (0.8, 0.6, 0.4), (0.5, 0.2, 0.1)
    sharing = Sharing(np.array([chat, code, code, chat, code, code, chat]))
    assert sharing.drafts(3, 10) == (1, 2, 2, 1, 2, 2, 0)
    assert sharing.drafts(3, 12) == (1, 3, 2, 1, 2, 2, 1)
    assert sharing.drafts(1, 5) == (1, 1, 1, 0, 1, 1, 0)
