"""Which rows get how many of a step's drafts, where rows may have different numbers. Pure: arrays in and out.

Drafts are given out in the order of their chances. A row's chances never rise with the depth, so that what it
gets are its first drafts.
"""

from __future__ import annotations

from typing import Final

import numpy as np

_LAST: Final = 65534.0  # rank of a draft that nobody accepts; that of the best is 1


class Sharing:
    """All rows' drafts in the order in which they are given out."""

    def __init__(self, reached: np.ndarray, due: np.ndarray | None = None) -> None:
        """
        Args:
            reached: [R, K] chance that a row accepts draft 1, 2, … K (and those before it).
            due: [R] bool: rows that get a first draft before anybody gets another, whatever its chance is.
        """
        self._reached = reached
        # Sixteen bits are sorted several times faster than floats, and no chance is known any better. Stable:
        # of equal ones in a row the lower depth is first.
        ranks = ((1.0 - reached) * _LAST).astype(np.uint16)
        ranks += 1
        if due is not None:
            ranks[due, 0] = 0
        self._order = ranks.ravel().argsort(kind="stable")  # [R * K]
        self._depths = self._order % reached.shape[1]
        self._chances = reached.ravel().take(self._order)
        self._gained: dict[
            int, np.ndarray
        ] = {}  # by the longest draft: [drafts] accepted with 1, 2, … drafts

    def extra_tokens(self) -> list[float]:
        """[K + 1] drafts expected to be accepted where all rows have 0, 1, … K."""
        return [0.0, *self._reached.sum(axis=0).cumsum().tolist()]

    def accepted(self, longest: int, num_drafts: int) -> float:
        """Of so many drafts, at most ``longest`` to a row (no more than the rows can take), those expected to
        be accepted.
        """
        gained = self._gained.get(longest)
        if gained is None:
            gained = self._chances[self._depths < longest].cumsum()
            self._gained[longest] = gained
        return float(gained[num_drafts - 1]) if num_drafts else 0.0

    def drafts(self, longest: int, num_drafts: int) -> tuple[int, ...]:
        """[R] that many drafts, given out."""
        assert num_drafts <= len(self._reached) * longest, "more drafts than rows can take"
        rows = self._order[self._depths < longest][:num_drafts] // self._reached.shape[1]
        return tuple(np.bincount(rows, minlength=len(self._reached)).tolist())
