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
HOPE: Final = 1.0  # standard deviations by which a row may be better than it is thought
DUE_SHARE: Final = 16  # at most one row in so many is given a draft for that reason

_KEPT_AFTER: Final = KEPT ** np.arange(1024)  # [steps]; after more of them next to nothing is left

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

    rows: Sequence[DraftRow]  # a list: it is compared with those of other steps
    drafts: Sequence[int]  # that it verified
    correct: Sequence[int]  # that it accepted; -1: its logits were broken at once


class RowAcceptance:
    def __init__(self, num_slots: int, num_steps: int) -> None:
        size = num_slots + 1
        self._num_steps = num_steps
        self._now = 0
        self._names: dict[str, int] = {}  # class -> index
        self._owner = np.full(size, -1, np.int64)  # [slots] arrival of the request that the rest is about
        self._class = np.zeros(size, np.int64)  # [slots] index of its name
        self._cap = np.zeros(size, np.int64)  # [slots] most drafts, at most num_steps
        # [slots, 4] first and deeper drafts that were tried, then those accepted; decayed up to ``_seen``
        self._counts = np.zeros((size, 4))
        self._seen = np.zeros(size, np.int64)  # [slots] step of the last draft
        self._last: tuple[list[int], list[DraftRow]] = ([], [])
        self._last_slots = np.zeros(0, np.int64)

    def step(self) -> None:
        """A decode step was committed, in whatever mode."""
        self._now += 1

    def sharing(self, rows: Sequence[DraftRow], parts: Parts) -> Sharing:
        """What these rows are expected to accept, for a step of all of them."""
        return self._sharing(rows, parts, 0.0)

    def hopes(self, rows: Sequence[DraftRow], parts: Parts) -> Sharing:
        """The same, if each is as good as what it showed leaves room for."""
        return self._sharing(rows, parts, HOPE)

    def _sharing(self, rows: Sequence[DraftRow], parts: Parts, hope: float) -> Sharing:
        slots = self._slots_of(rows)
        priors = np.array([_first_and_deeper(parts(name)) for name in self._names])  # [classes, 2]
        seen = self._counts.take(slots, axis=0)  # [R, 4]
        seen *= self._kept_since_seen(slots)
        tried, accepted = seen[:, :2], seen[:, 2:]
        accepted += (PRIOR_DRAFTS * priors).take(self._class.take(slots), axis=0)
        tried += PRIOR_DRAFTS
        accepted /= tried  # chances of a first draft, of a deeper one
        if hope:
            accepted += hope * np.sqrt(accepted * (1.0 - accepted) / (tried + 1.0))
            np.minimum(accepted, 1.0, out=accepted)
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
        correct = np.array(outcomes.correct, np.int64)  # [R]
        drafts = np.minimum(np.array(outcomes.drafts, np.int64), self._cap.take(slots))  # [R] it could accept
        had = (drafts > 0) & (correct >= 0)
        if not had.all():
            slots, drafts, correct = slots[had], drafts[had], correct[had]
        new = np.ones((len(slots), 4))
        np.minimum(correct, drafts - 1, out=new[:, 1], casting="unsafe")
        np.minimum(correct, 1, out=new[:, 2], casting="unsafe")
        np.subtract(correct, new[:, 2], out=new[:, 3])
        new += self._counts.take(slots, axis=0) * self._kept_since_seen(slots)
        self._counts[slots] = new
        self._seen[slots] = self._now

    def _kept_since_seen(self, slots: np.ndarray) -> np.ndarray:
        """[R, 1]"""
        return _KEPT_AFTER.take(self._now - self._seen.take(slots), mode="clip")[:, None]

    def _slots_of(self, rows: Sequence[DraftRow]) -> np.ndarray:
        """[R]; who had these slots before is forgotten. Mostly the rows are those of the last step."""
        slots = [row.slot for row in rows]
        if (slots, rows) != self._last:
            self._last = (slots, list(rows))
            self._last_slots = np.array(slots, np.int64)
            self._begin(self._last_slots, rows)
        return self._last_slots

    def _begin(self, slots: np.ndarray, rows: Sequence[DraftRow]) -> None:
        """What is new is due at once."""
        arrivals = np.array([row.arrival for row in rows], np.int64)
        for index in np.flatnonzero(self._owner[slots] != arrivals).tolist():
            row, slot, cap = rows[index], slots[index], rows[index].draft_cap
            self._owner[slot] = row.arrival
            self._class[slot] = self._names.setdefault(row.draft_class, len(self._names))
            self._cap[slot] = self._num_steps if cap is None else min(cap, self._num_steps)
            self._counts[slot] = 0.0
            self._seen[slot] = self._now - UNTRIED_STEPS

    def _due(self, slots: np.ndarray, caps: np.ndarray) -> np.ndarray | None:
        """[R] bool. Of too many the first; the others are due next time."""
        seen, last = self._seen.take(slots), self._now - UNTRIED_STEPS
        if seen.min() > last:
            return None
        due = (seen <= last) & (caps > 0)
        most = max(1, len(slots) // DUE_SHARE)
        if np.count_nonzero(due) > most:
            due[np.flatnonzero(due)[most:]] = False
        return due


def _first_and_deeper(parts: Sequence[float]) -> tuple[float, float]:
    deeper = parts[1:] or parts
    return parts[0], sum(deeper) / len(deeper)
