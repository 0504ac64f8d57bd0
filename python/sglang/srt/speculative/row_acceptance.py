"""How many drafts each decoding request will accept: what it showed itself, shrunk to what its class shows.

Two chances a request: that of its first draft, and one for every deeper draft (a chance for each depth would
never be learned where no draft of that depth is tried). What was seen fades with every step, tried or not, so
a request that gets no drafts comes back to its class, and now and then it is given one to see.

Arrays by slot: one pass for all rows of a step costs the host less than a few lines of Python for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from sglang.srt.speculative.allocation import Sharing

PRIOR_DRAFTS: Final = 4.0  # tries that the class's chances count as
KEPT: Final = 0.99  # of what was seen, a step
UNTRIED_STEPS: Final = 64  # after so many without a draft a row is due for one
DUE_SHARE: Final = 16  # at most one row in so many is given a draft for that reason

Parts = Callable[[str], Sequence[float]]
"""A class's chances of drafts 1, 2, … where those before were accepted."""


class DraftRow(Protocol):
    """What is asked of a decoding request (``Request``)."""

    @property
    def slot(self) -> int: ...

    @property
    def arrival(self) -> int:
        """No two requests have the same: a slot's next request begins anew."""
        ...

    @property
    def draft_class(self) -> str: ...

    @property
    def draft_cap(self) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Rows of a speculative step, one entry each."""

    rows: list[DraftRow]
    drafts: list[int]  # that it could accept
    correct: list[int]  # that it did


class RowAcceptance:
    def __init__(self, num_slots: int, num_steps: int) -> None:
        size = num_slots + 1
        self._num_steps = num_steps
        self._now = 0
        self._names: dict[str, int] = {}  # class -> index
        self._owner = np.full(size, -1, np.int64)  # [slots] arrival of the request that the rest is about
        self._class = np.full(size, -1, np.int64)  # [slots] -1: not known yet
        self._cap = np.zeros(size, np.int64)  # [slots] most drafts, at most num_steps
        # [slots, 2] first drafts and deeper ones, decayed up to ``seen``.
        self._tried = np.zeros((size, 2))
        self._accepted = np.zeros((size, 2))
        self._seen = np.zeros(size, np.int64)  # [slots] step of the last draft
        self._last: tuple[list[int], list[DraftRow]] = ([], [])
        self._last_slots = np.zeros(0, np.int64)

    def step(self) -> None:
        """A decode step was committed, in whatever mode."""
        self._now += 1

    def sharing(self, rows: Sequence[DraftRow], parts: Parts) -> Sharing:
        """What these rows are expected to accept, for a step of all of them."""
        slots = self._slots_of(rows)
        classes = self._class.take(slots)  # [R]
        if classes.min() < 0:
            for index in np.flatnonzero(classes < 0).tolist():
                self._classify(rows[index])
            classes = self._class.take(slots)
        priors = np.array([_first_and_deeper(parts(name)) for name in self._names])  # [classes, 2]
        kept = KEPT ** (self._now - self._seen.take(slots))  # [R]
        tried, accepted = self._tried.take(slots, axis=0), self._accepted.take(slots, axis=0)  # [R, 2]
        accepted *= kept[:, None]
        accepted += (PRIOR_DRAFTS * priors).take(classes, axis=0)
        tried *= kept[:, None]
        tried += PRIOR_DRAFTS
        accepted /= tried  # chances of a first draft, of a deeper one
        reached = np.empty((len(rows), self._num_steps))
        reached[:, 0] = accepted[:, 0]
        for depth in range(1, self._num_steps):
            np.multiply(reached[:, depth - 1], accepted[:, 1], out=reached[:, depth])
        caps = self._cap.take(slots)  # [R]
        if caps.min() < self._num_steps:
            reached[np.arange(self._num_steps) >= caps[:, None]] = 0.0
        return Sharing(reached, self._due(slots, caps))

    def observe(self, outcomes: Outcomes) -> None:
        """A speculative step's rows."""
        if not outcomes.rows:
            return
        slots = self._slots_of(outcomes.rows)
        drafts, correct = np.array([outcomes.drafts, outcomes.correct], np.int64)  # [R] each
        had = drafts > 0
        if not had.all():
            slots, drafts, correct = slots[had], drafts[had], correct[had]
        kept = KEPT ** (self._now - self._seen.take(slots))[:, None]  # [R, 1]
        accepted = np.stack((np.minimum(correct, 1), correct), axis=1)  # [R, 2] first, then all
        accepted[:, 1] -= accepted[:, 0]
        tried = np.ones_like(accepted)
        np.minimum(correct, drafts - 1, out=tried[:, 1])
        for kept_counts, new in ((self._tried, tried), (self._accepted, accepted)):
            kept_counts[slots] = kept_counts.take(slots, axis=0) * kept + new
        self._seen[slots] = self._now

    def _slots_of(self, rows: Sequence[DraftRow]) -> np.ndarray:
        """[R]; who had these slots before is forgotten. Mostly the rows are those of the last step."""
        slots = [row.slot for row in rows]
        if (slots, rows) != self._last:
            self._last = (slots, list(rows))
            self._last_slots = np.array(slots, np.int64)
            self._begin(self._last_slots, np.array([row.arrival for row in rows], np.int64))
        return self._last_slots

    def _begin(self, slots: np.ndarray, owners: np.ndarray) -> None:
        """What is new is due at once."""
        others = self._owner[slots] != owners
        if others.any():
            fresh = slots[others]
            self._owner[fresh] = owners[others]
            self._class[fresh] = -1
            self._tried[fresh] = self._accepted[fresh] = 0.0
            self._seen[fresh] = self._now - UNTRIED_STEPS

    def _classify(self, row: DraftRow) -> None:
        cap = row.draft_cap
        self._class[row.slot] = self._names.setdefault(row.draft_class, len(self._names))
        self._cap[row.slot] = self._num_steps if cap is None else min(cap, self._num_steps)

    def _due(self, slots: np.ndarray, caps: np.ndarray) -> np.ndarray:
        """[R] bool. Of too many the first; the others are due next time."""
        due = (self._seen.take(slots) <= self._now - UNTRIED_STEPS) & (caps > 0)
        most = max(1, len(slots) // DUE_SHARE)
        if np.count_nonzero(due) > most:
            due[np.flatnonzero(due)[most:]] = False
        return due


def _first_and_deeper(parts: Sequence[float]) -> tuple[float, float]:
    deeper = parts[1:] or parts
    return parts[0], sum(deeper) / len(deeper)
