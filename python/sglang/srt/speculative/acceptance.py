"""How many drafts a row will accept: an estimate by request class and depth that forgets.

``p_j`` is the part of the rows that accepted drafts 1 … j-1 and accepted draft j too. A row with k drafts is
then expected to give 1 + p1 + p1 p2 + … tokens. What isn't seen keeps its mean; only the trust in it fades.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

ClassCounts = tuple[tuple[str, float], ...]  # class -> rows of it

DEFAULT_PRIOR: Final = (0.7, 0.6, 0.5)  # deeper drafts: as the last one
PRIOR_ROWS: Final = 8.0  # rows that the mean before them counts as, at least
MOST_ROWS: Final = 512.0  # rows that the past counts as, at most: what many rows show now is worth more
KEPT: Final = 1 - 1 / 64  # of the trust, a decode step
QUANTILE: Final = 1.0  # standard deviations of an upper bound: it is exceeded 1 time in 6
MOST_CLASSES: Final = 16
OTHER: Final = "other"  # of the classes after the first ones


@dataclass(slots=True)
class _Depth:
    mean: float
    trust: float = 0.0  # rows behind the mean, decayed
    seen_at: int = 0

    def trust_at(self, now: int) -> float:
        return self.trust * KEPT ** (now - self.seen_at)

    def add(self, now: int, num_rows: int, num_accepted: int) -> None:
        trust = self.trust_at(now)
        self.mean += (num_accepted / num_rows - self.mean) * num_rows / (max(trust, PRIOR_ROWS) + num_rows)
        self.trust = min(trust + num_rows, MOST_ROWS)
        self.seen_at = now

    def upper(self, now: int) -> float:
        """Wilson's upper bound of the part; 1 where nothing is known."""
        trust, square = self.trust_at(now), QUANTILE * QUANTILE
        if trust < 1e-3:
            return 1.0
        spread = math.sqrt(self.mean * (1.0 - self.mean) / trust + square / (4.0 * trust * trust))
        return min(1.0, (self.mean + square / (2.0 * trust) + QUANTILE * spread) / (1.0 + square / trust))


class AcceptanceEstimate:
    def __init__(self, num_steps: int, prior: Mapping[str, Sequence[float]] | None = None) -> None:
        """``prior``: p1, p2, … of the classes known; ``DEFAULT_PRIOR`` for others."""
        self._num_steps = num_steps
        self._prior = {name: tuple(parts) for name, parts in (prior or {}).items()}
        self._classes: dict[str, list[_Depth]] = {}
        self._now = 0

    def step(self) -> None:
        """A decode step was committed, in whatever mode: what was seen before is one step older."""
        self._now += 1

    def observe(self, name: str, proposed_by_depth: Sequence[int], correct_by_depth: Sequence[int]) -> None:
        """A speculative step's rows of one class.

        Args:
            proposed_by_depth: rows that could accept a draft at depth 1, 2, …; where they have different
                numbers of drafts, those of them that had accepted the ones before it.
            correct_by_depth: rows that did (and so the drafts before it too).
        """
        num_rows = proposed_by_depth[0] if proposed_by_depth else 0
        for depth, proposed, correct in zip(
            self._depths(name, create=True), proposed_by_depth, correct_by_depth, strict=False
        ):
            num_rows = min(num_rows, proposed)
            if num_rows <= 0:
                return
            depth.add(self._now, num_rows, min(correct, num_rows))
            num_rows = correct

    def expected_tokens(self, counts: ClassCounts, draft_len: int) -> float:
        """Tokens of a step with ``draft_len`` drafts over these rows."""
        return sum(rows for _, rows in counts) + self.extra_tokens(counts, draft_len)[draft_len]

    def extra_tokens(self, counts: ClassCounts, longest: int) -> list[float]:
        """[longest + 1] drafts expected to be accepted with 0, 1, … drafts, over these rows."""
        extra = [0.0] * (longest + 1)
        for name, rows in counts:
            _add(extra, rows, [depth.mean for depth in self._depths(name)])
        return extra

    def most_extra_tokens(self, counts: ClassCounts, longest: int) -> list[float]:
        """The same, if drafts are as good as what was seen leaves room for."""
        extra = [0.0] * (longest + 1)
        for name, rows in counts:
            _add(extra, rows, [depth.upper(self._now) for depth in self._depths(name)])
        return extra

    def parts(self, name: str) -> tuple[float, ...]:
        """p1, p2, … as estimated."""
        return tuple(depth.mean for depth in self._depths(name))

    def figures(self) -> dict[str, Any]:
        return {
            name: {
                "by_depth": [depth.mean for depth in depths],
                "trust_rows": [depth.trust_at(self._now) for depth in depths],
            }
            for name, depths in self._classes.items()
        }

    def _depths(self, name: str, create: bool = False) -> list[_Depth]:
        depths = self._classes.get(name)
        if depths is not None:
            return depths
        if len(self._classes) >= MOST_CLASSES:
            name = OTHER
            depths = self._classes.get(name)
            if depths is not None:
                return depths
        prior = self._prior.get(name) or DEFAULT_PRIOR
        depths = [_Depth(prior[min(index, len(prior) - 1)]) for index in range(self._num_steps)]
        if create:
            self._classes[name] = depths
        return depths


def _add(extra: list[float], rows: float, parts: Sequence[float]) -> None:
    """Add what ``rows`` rows accept with 1, 2, … drafts; more drafts than there are parts bring nothing."""
    reached, total = rows, 0.0
    for draft_len in range(1, len(extra)):
        if draft_len <= len(parts):
            reached *= parts[draft_len - 1]
            total += reached
        extra[draft_len] += total
