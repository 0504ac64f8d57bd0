"""Which part of a size a rank has: all parts together are the whole, and nothing is in two of them.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.distributed.shares import ShardingError, even_span, head_spans, padded_span

SIZES = st.integers(1, 16)


@given(total=st.integers(1, 5000), size=SIZES, unit=st.integers(1, 128))
def test_even_spans_are_whole_pieces_that_differ_by_one_at_most(total: int, size: int, unit: int) -> None:
    if -(-total // unit) < size:
        with pytest.raises(ShardingError, match=f"x {total} can't be split over {size} ranks"):
            even_span(total, 0, size, unit, "x")
        return
    spans = [even_span(total, rank, size, unit, "x") for rank in range(size)]
    assert [i for span in spans for i in range(span.begin, span.end)] == list(range(total))
    assert all(span.begin % unit == 0 and span.size > 0 for span in spans)
    pieces = [-(-span.size // unit) for span in spans]
    assert max(pieces) - min(pieces) <= 1


@given(total=st.integers(1, 5000), size=SIZES)
def test_padded_spans_fit_into_one_size(total: int, size: int) -> None:
    spans = [padded_span(total, rank, size) for rank in range(size)]
    assert [i for span in spans for i in range(span.begin, span.end)] == list(range(total))
    each = -(-total // size)
    assert all(
        span.size <= each and (span.size == 0 or span.begin == rank * each) for rank, span in enumerate(spans)
    )


@given(group=st.integers(1, 8), num_kv_heads=st.integers(1, 16), size=SIZES)
def test_query_heads_are_with_the_kv_heads_that_they_read(group: int, num_kv_heads: int, size: int) -> None:
    num_heads = group * num_kv_heads
    if num_heads % size or (num_kv_heads % size and size % num_kv_heads):
        with pytest.raises(ShardingError, match="folder: .* heads can"):
            head_spans(num_heads, num_kv_heads, 0, size, "folder")
        return
    seen = []
    for rank in range(size):
        heads = head_spans(num_heads, num_kv_heads, rank, size, "folder")
        own_group = heads.q.size // heads.kv.size
        assert own_group * heads.kv.size == heads.q.size
        for i, head in enumerate(range(heads.q.begin, heads.q.end)):
            assert heads.kv.begin + i // own_group == head // group
        seen += range(heads.q.begin, heads.q.end)
    assert seen == list(range(num_heads))
