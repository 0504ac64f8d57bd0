"""Which rows get how many of a step's drafts, where rows may have different numbers. Pure functions.

Rows of one class are alike, so whole blocks (a class's drafts of one depth) are given out in the order of
their chances; only the last block may be cut, and then any of its rows will do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClassRows:
    """Rows of one class in a step."""

    rows: int
    reached: tuple[float, ...]  # chance that draft 1, 2, … is accepted; never rising


@dataclass(frozen=True, slots=True)
class ClassDrafts:
    """What they get: all of them ``each`` drafts, and the first ``more`` of them one more."""

    each: int
    more: int

    def of_rows(self, rows: int) -> list[int]:
        return [self.each + (row < self.more) for row in range(rows)]


@dataclass(frozen=True, slots=True)
class Allocation:
    by_class: Mapping[str, ClassDrafts]
    extra_tokens: float  # drafts expected to be accepted, of all rows


def allocate(classes: Mapping[str, ClassRows], num_drafts: int, longest: int) -> Allocation:
    """Give out ``num_drafts`` drafts, at most ``longest`` to a row; the most are expected to be accepted.

    What no row can take is left over.
    """
    blocks = [
        (-chance, depth, name)
        for name, of in classes.items()
        for depth, chance in enumerate(of.reached[:longest])
    ]
    given = dict.fromkeys(classes, ClassDrafts(0, 0))
    extra, left = 0.0, num_drafts
    for chance, depth, name in sorted(blocks):
        rows = min(left, classes[name].rows)
        if rows == 0:
            continue
        # Of one class depths come in order: chances never rise, and equal ones are sorted by depth.
        given[name] = ClassDrafts(depth + 1, 0) if rows == classes[name].rows else ClassDrafts(depth, rows)
        extra -= chance * rows
        left -= rows
    return Allocation(given, extra)


def drafts_of_rows(names: Sequence[str], allocation: Allocation) -> list[int]:
    """[R] by the rows' classes."""
    seen: dict[str, int] = {}
    drafts = []
    for name in names:
        place = seen.get(name, 0)
        seen[name] = place + 1
        of_class = allocation.by_class[name]
        drafts.append(of_class.each + (place < of_class.more))
    return drafts
