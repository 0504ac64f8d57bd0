"""Did the accept length drift between the first and the last answers? Prompt by prompt, for these differ."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

_CHANCE: Final = 1.96  # standard errors


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished request. ``emitted``: tokens of its speculative steps; ``verified``: those steps."""

    prompt: str
    at_s: float
    emitted: int
    verified: int


@dataclass(frozen=True, slots=True)
class Drift:
    """``change``: last over first, less 1, the mean over prompts; ``error``: its standard error."""

    first: float
    last: float
    change: float
    error: float
    prompts: int

    def __str__(self) -> str:
        return (
            f"accept length {self.first:.3f} at first, {self.last:.3f} at last; over {self.prompts} prompts"
            f" that both have {100 * self.change:+.2f} % (standard error {100 * self.error:.2f} %)"
        )

    def is_more_than(self, tolerance: float, by_chance_too: bool) -> bool:
        """``by_chance_too``: a change that chance makes is none."""
        allowed = max(tolerance, _CHANCE * self.error) if by_chance_too else tolerance
        return not abs(self.change) <= allowed  # NaN: nothing to compare is no success


def compare(answers: Sequence[Answer], window_s: float) -> Drift:
    """The answers of the first ``window_s`` seconds with those of the last."""
    if not answers:
        return Drift(math.nan, math.nan, math.nan, math.nan, 0)
    begin, end = min(one.at_s for one in answers), max(one.at_s for one in answers)
    first = _by_prompt([one for one in answers if one.at_s <= begin + window_s])
    last = _by_prompt([one for one in answers if one.at_s >= end - window_s])
    both = sorted(set(first) & set(last))
    changes = [_ratio(last[name]) / _ratio(first[name]) - 1 for name in both]
    change = statistics.fmean(changes) if changes else math.nan
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return Drift(
        _ratio([one for name in both for one in first[name]]),
        _ratio([one for name in both for one in last[name]]),
        change, error, len(both),
    )  # fmt: skip


def _by_prompt(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    found: dict[str, list[Answer]] = {}
    for one in answers:
        found.setdefault(one.prompt, []).append(one)
    return found


def _ratio(answers: Sequence[Answer]) -> float:
    verified = sum(one.verified for one in answers)
    return sum(one.emitted for one in answers) / verified if verified else math.nan
