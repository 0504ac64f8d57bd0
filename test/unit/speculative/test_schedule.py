"""``--speculative-bs-schedule``: what it means, and what is refused with which words."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.schedule import BsSchedule, ScheduleError, decide_by_schedule, parse_bs_schedule
from sglang.srt.speculative.toggle import Decision, Reason

SCHEDULE = parse_bs_schedule("1-4:5, 5-16:3,17:1,18-32:3,33-:0")


@pytest.mark.parametrize(
    ("rows", "length"), [(1, 5), (4, 5), (5, 3), (16, 3), (17, 1), (18, 3), (33, 0), (999, 0)]
)
def test_lengths(rows: int, length: int) -> None:
    assert SCHEDULE.draft_len(rows) == length


def test_what_must_be_prepared() -> None:
    assert SCHEDULE.draft_lens == (1, 3, 5)
    assert SCHEDULE.max_spec_rows == 32
    assert [SCHEDULE.max_rows_of(k) for k in (1, 2, 3, 5)] == [17, 0, 32, 4]
    always = parse_bs_schedule("1-:2")
    assert always.max_spec_rows is None and always.max_rows_of(2) is None
    assert parse_bs_schedule("1-:0").max_spec_rows == 0


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9)), max_size=6), st.integers(0, 9))
def test_a_schedule_survives_its_text(ranges: list[tuple[int, int]], last: int) -> None:
    ends = [sum(n for n, _ in ranges[: index + 1]) for index in range(len(ranges))]
    schedule = BsSchedule(tuple(ends), (*(length for _, length in ranges), last))
    assert parse_bs_schedule(str(schedule)) == schedule
    for first, end, (_, length) in zip([1, *(e + 1 for e in ends)], ends, ranges, strict=False):
        assert schedule.draft_len(first) == schedule.draft_len(end) == length


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no range"),
        ("1-4", "is no range"),
        ("1-4:-1,5-:0", "is no range"),
        ("1-4:3,,5-:0", "is no range"),
        ("1-4:3;5-:0", "is no range"),
        ("2-4:3,5-:0", "must begin at 1"),
        ("0-4:3,5-:0", "must begin at 1"),
        ("1-4:3,6-:0", "must begin at 5"),
        ("1-4:3,4-:0", "must begin at 5"),
        ("1-4:3,5-8:0", "must have no end"),
        ("1-:3,5-:0", "only the last range"),
        ("1-4:3,5-2:0", "ends before it begins"),
    ],
)
def test_what_is_refused(text: str, words: str) -> None:
    with pytest.raises(ScheduleError, match=words) as refused:
        parse_bs_schedule(text)
    assert "1-4:5,5-16:3,17-32:1,33-:0" in str(refused.value)


STATE = AutoInput(
    num_decoding=4,
    class_counts=(("greedy", 4.0),),
    kv_tokens=400,
    num_steps=5,
    prepared_lens=(1, 3, 5),
    fitting_lens=(1, 3, 5),
)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, Decision(5, Reason.BATCH_SIZE)),
        ({"num_decoding": 17}, Decision(1, Reason.BATCH_SIZE)),
        ({"num_decoding": 40}, Decision(0, Reason.BATCH_SIZE)),
        ({"prepared_lens": (1, 3), "fitting_lens": (1, 3)}, Decision(0, Reason.BATCH_SIZE)),
        ({"fitting_lens": (1, 3)}, Decision(3, Reason.MEMORY)),
        ({"fitting_lens": ()}, Decision(0, Reason.MEMORY)),
        ({"class_counts": ()}, Decision(0, Reason.REQUEST)),
        ({"num_steps": 0}, Decision(0, Reason.NO_DRAFTER)),
    ],
)
def test_decisions(change: dict[str, object], expected: Decision) -> None:
    assert decide_by_schedule(replace(STATE, **change), SCHEDULE) == expected  # type: ignore[arg-type]
