"""Who gets a step's drafts: as many accepted as any allocation reaches."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.speculative.allocation import ClassRows, allocate, drafts_of_rows

CHANCES = st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3).map(
    lambda parts: tuple(sorted(parts, reverse=True))
)
CLASSES = st.dictionaries(
    st.sampled_from("abc"), st.builds(ClassRows, st.integers(1, 2), CHANCES), min_size=1
)


@settings(max_examples=60)
@given(classes=CLASSES, num_drafts=st.integers(0, 20), longest=st.integers(1, 3))
def test_no_allocation_is_expected_to_accept_more(
    classes: dict[str, ClassRows], num_drafts: int, longest: int
) -> None:
    given_out = allocate(classes, num_drafts, longest)
    names = [name for name, of in classes.items() for _ in range(of.rows)]
    drafts = drafts_of_rows(names, given_out)
    assert sum(drafts) == min(num_drafts, longest * len(names)) and max(drafts) <= longest

    def accepted(lens: tuple[int, ...]) -> float:
        return sum(sum(classes[name].reached[:k]) for name, k in zip(names, lens, strict=True))

    assert given_out.extra_tokens == pytest.approx(accepted(tuple(drafts)))
    every = product(range(longest + 1), repeat=len(names))
    best = max(accepted(lens) for lens in every if sum(lens) == sum(drafts))
    assert accepted(tuple(drafts)) == pytest.approx(best)


def test_rows_of_a_class_differ_by_one_at_most() -> None:
    classes = {"code": ClassRows(4, (0.8, 0.6, 0.4)), "chat": ClassRows(3, (0.5, 0.2, 0.1))}
    names = ["chat", "code", "code", "chat", "code", "code", "chat"]
    assert drafts_of_rows(names, allocate(classes, 10, 3)) == [1, 2, 2, 1, 2, 2, 0]
    assert drafts_of_rows(names, allocate(classes, 12, 3)) == [1, 3, 2, 1, 2, 2, 1]
