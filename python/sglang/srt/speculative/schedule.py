"""``--speculative-bs-schedule``: draft lengths by decoding rows, as ``1-4:5,5-16:3,17-32:1,33-:0``."""

from __future__ import annotations

import re
from bisect import bisect_left
from dataclasses import dataclass
from typing import Final

from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.toggle import Decision, Reason

EXAMPLE: Final = "1-4:5,5-16:3,17-32:1,33-:0"
_RANGE: Final = re.compile(r"\s*(\d+)\s*(?:(-)\s*(\d*)\s*)?:\s*(\d+)\s*")


class ScheduleError(ValueError):
    """A schedule that says nothing or not one thing; the message says what to write."""


@dataclass(frozen=True, slots=True)
class BsSchedule:
    """Made by ``parse_bs_schedule``."""

    last_rows: tuple[int, ...]  # of each range but the open one, ascending
    lengths: tuple[int, ...]  # drafts of each range; one more than last_rows: the open range's

    def draft_len(self, rows: int) -> int:
        return self.lengths[bisect_left(self.last_rows, rows)]

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """Those that speculate, ascending."""
        return tuple(sorted({length for length in self.lengths if length}))

    @property
    def max_spec_rows(self) -> int | None:
        """Most rows that speculate; None: any number."""
        if self.lengths[-1]:
            return None
        spans = zip(self.last_rows, self.lengths, strict=False)
        return max((last for last, length in spans if length), default=0)

    def max_rows_of(self, draft_len: int) -> int | None:
        """Most rows that get ``draft_len`` drafts; None: any number; 0: none."""
        if self.lengths[-1] == draft_len:
            return None
        spans = zip(self.last_rows, self.lengths, strict=False)
        return max((last for last, length in spans if length == draft_len), default=0)

    def __str__(self) -> str:
        firsts = (1, *(last + 1 for last in self.last_rows))
        lasts = (*(str(last) for last in self.last_rows), "")
        parts = zip(firsts, lasts, self.lengths, strict=True)
        return ",".join(f"{first}-{last}:{length}" for first, last, length in parts)


def parse_bs_schedule(text: str) -> BsSchedule:
    """Ranges of rows with their draft lengths; the last one has no end.

    Raises:
        ScheduleError: no such list, or one with gaps, overlaps or no open end.
    """
    last_rows: list[int] = []
    lengths: list[int] = []
    parts = text.split(",")
    for number, part in enumerate(parts):
        first, last, length = _parse_range(part)
        expected = last_rows[-1] + 1 if last_rows else 1
        if first != expected:
            raise ScheduleError(
                f"range {part.strip()!r} must begin at {expected}, after the range before it, so that "
                f"every number of rows has one length; write for example {EXAMPLE}"
            )
        is_last = number == len(parts) - 1
        if (last is None) != is_last:
            wrong = f"the last range {part.strip()!r} must have no end" if is_last else (
                f"only the last range may have no end, not {part.strip()!r}"
            )  # fmt: skip
            raise ScheduleError(f"{wrong}; write for example {EXAMPLE}")
        lengths.append(length)
        if last is not None:
            last_rows.append(last)
    return BsSchedule(tuple(last_rows), tuple(lengths))


def _parse_range(part: str) -> tuple[int, int | None, int]:
    """First and last number of rows (None: no end), and the drafts."""
    match = _RANGE.fullmatch(part)
    if match is None:
        raise ScheduleError(
            f"{part.strip()!r} is no range: write FIRST-LAST:DRAFTS, and FIRST-:DRAFTS for the last one, "
            f"for example {EXAMPLE}"
        )
    first = int(match[1])
    last = first if match[2] is None else int(match[3]) if match[3] else None
    if last is not None and last < first:
        raise ScheduleError(f"range {part.strip()!r} ends before it begins; write for example {EXAMPLE}")
    return first, last, int(match[4])


def decide_by_schedule(state: AutoInput, schedule: BsSchedule) -> Decision:
    """The schedule's length, or the longest below it whose pages fit."""
    wanted = schedule.draft_len(state.num_decoding)
    if state.num_steps == 0:
        return Decision(0, Reason.NO_DRAFTER)
    if wanted == 0 or wanted not in state.prepared_lens:
        return Decision(0, Reason.BATCH_SIZE)
    if not state.class_counts:
        return Decision(0, Reason.REQUEST)
    fitting = max((k for k in state.fitting_lens if k <= wanted), default=0)
    return Decision(fitting, Reason.BATCH_SIZE if fitting == wanted else Reason.MEMORY)
