"""The last decode steps, for who watches the server: written by the loop, read by another thread.

A list of fixed length, one assignment a step. A reader copies it, which no step can be in the middle of, and
puts the steps in order by their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

RING_STEPS: Final = 512
RATE_WINDOW_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class RingStep:
    number: int  # 1, 2, … since the start
    draft_len: int  # 0: plain
    num_rows: int
    num_tokens: int
    ended_ts: float

    @property
    def row(self) -> list[int]:
        """As the page reads it."""
        return [self.number, self.draft_len, self.num_rows, self.num_tokens]


class StepRing:
    def __init__(self, length: int = RING_STEPS) -> None:
        self._steps: list[RingStep | None] = [None] * length
        self._num_added = 0

    def add(self, draft_len: int, num_rows: int, num_tokens: int, now: float) -> None:
        step = RingStep(self._num_added + 1, draft_len, num_rows, num_tokens, now)
        self._steps[self._num_added % len(self._steps)] = step
        self._num_added += 1

    def after(self, number: int) -> list[RingStep]:
        """Those that are kept, and have a larger number."""
        kept = [step for step in self._steps[:] if step is not None and step.number > number]
        return sorted(kept, key=lambda step: step.number)


def tokens_per_second(steps: list[RingStep], now: float) -> float:
    """Over the last seconds up to ``now``, or over what is kept where that began later.

    0 where nothing has been decoded lately.
    """
    recent = [step for step in steps if step.ended_ts > now - RATE_WINDOW_S]
    if not recent:
        return 0.0
    before = steps[-len(recent) - 1] if len(recent) < len(steps) else None
    # The first step that is kept has an end and no beginning: its tokens are not counted.
    counted = recent if before is not None else recent[1:]
    began = now - RATE_WINDOW_S if before is not None else recent[0].ended_ts
    return sum(step.num_tokens for step in counted) / (now - began) if counted and now > began else 0.0
