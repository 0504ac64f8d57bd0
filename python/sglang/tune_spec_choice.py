"""From costs and acceptance to what to start a server with. Pure: no torch, no clock, no files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.schedule import BsSchedule


@dataclass(frozen=True, slots=True)
class ShapeFigures:
    """One shape as it was measured."""

    shape: SpecShape
    table: CostTable  # of steps with 0 … num_steps drafts
    survival: tuple[float, ...]  # P(the draft at depth j is accepted), j = 1 … num_steps
    max_rows: int  # that a speculative step may have

    def expected_tokens(self, draft_len: int) -> float:
        """Of a row and step."""
        return 1.0 + sum(self.survival[:draft_len])

    def rate(self, draft_len: int, rows: int, kv_len: float) -> float:
        """Expected tokens per second of so many rows with ``kv_len`` places each."""
        return rows * self.expected_tokens(draft_len) / self.table.seconds(draft_len, rows, rows * kv_len)

    def best_len(self, rows: int, kv_len: float) -> int:
        """Of equals the shortest."""
        lens = range(self.shape.num_steps + 1) if rows <= self.max_rows else range(1)
        return max(lens, key=lambda draft_len: (self.rate(draft_len, rows, kv_len), -draft_len))

    def parts(self) -> tuple[float, ...]:
        """p1, p2, …: of the rows that accepted every draft before, those that accepted this one too."""
        before = (1.0, *self.survival[:-1])
        return tuple(now / then if then else 0.0 for now, then in zip(self.survival, before, strict=True))

    def cut(self, num_steps: int) -> ShapeFigures:
        """A chain of fewer drafts, whose steps are the first ones of this. Not for trees."""
        assert self.shape.topk == 1 and 1 <= num_steps <= self.shape.num_steps
        costs = [cost for cost in self.table.costs if cost.draft_len <= num_steps]
        table = CostTable.from_costs(costs, self.table.padded)
        return ShapeFigures(SpecShape(num_steps), table, self.survival[:num_steps], self.max_rows)


def survival(correct_histogram: Sequence[int], num_steps: int) -> tuple[float, ...]:
    """From how many rows accepted 0, 1, 2, … drafts in steps of ``num_steps`` drafts."""
    total = sum(correct_histogram)
    assert total, "no speculative step was seen"
    return tuple(sum(correct_histogram[depth:]) / total for depth in range(1, num_steps + 1))


@dataclass(frozen=True, slots=True)
class Choice:
    """What is best for one shape over the batch sizes asked about, all of equal weight."""

    figures: ShapeFigures
    schedule: BsSchedule
    threshold: int | None  # most rows that speculate with all drafts; 0: none; None: all
    schedule_score: float
    threshold_score: float


def choose(figures: ShapeFigures, sizes: Sequence[int], kv_len: float) -> Choice:
    lens = [figures.best_len(rows, kv_len) for rows in sizes]
    threshold = best_threshold(figures, sizes, kv_len)
    full = figures.shape.num_steps
    by_threshold = [full if threshold is None or rows <= threshold else 0 for rows in sizes]
    return Choice(
        figures,
        schedule_of(sizes, lens),
        threshold,
        score(figures, sizes, lens, kv_len),
        score(figures, sizes, by_threshold, kv_len),
    )


def choose_best(found: Sequence[ShapeFigures], sizes: Sequence[int], kv_len: float) -> Choice:
    """The shape with the best schedule; of a chain no more steps than that uses."""
    choices = [choose(figures, sizes, kv_len) for figures in found]
    best = max(choices, key=lambda choice: choice.schedule_score)
    longest = max(best.schedule.draft_lens, default=1)
    if best.figures.shape.topk > 1 or longest == best.figures.shape.num_steps:
        return best
    return choose(best.figures.cut(longest), sizes, kv_len)


def best_fixed(found: Sequence[ShapeFigures], sizes: Sequence[int], kv_len: float) -> Choice:
    """The shape, a shorter chain included, that is best with a threshold alone."""
    shapes = [
        figures.cut(num_steps)
        for figures in found
        if figures.shape.topk == 1
        for num_steps in range(1, figures.shape.num_steps + 1)
    ]
    shapes += [figures for figures in found if figures.shape.topk > 1]
    return max((choose(s, sizes, kv_len) for s in shapes), key=lambda choice: choice.threshold_score)


def best_threshold(figures: ShapeFigures, sizes: Sequence[int], kv_len: float) -> int | None:
    """The size up to which steps with all drafts give the most over all sizes; None: at every size."""
    gains = [_gain(figures, rows, kv_len) for rows in sizes]
    totals = [sum(gains[:count]) for count in range(len(sizes) + 1)]
    count = max(range(len(totals)), key=lambda number: (totals[number], -number))
    if count == len(sizes):
        return None
    return 0 if count == 0 else _crossing(sizes[count - 1], sizes[count], gains[count - 1], gains[count])


def _gain(figures: ShapeFigures, rows: int, kv_len: float) -> float:
    """Logarithm of speculative over plain; a size without speculative steps loses nothing."""
    if rows > figures.max_rows:
        return 0.0
    full = figures.shape.num_steps
    return math.log(figures.rate(full, rows, kv_len) / figures.rate(0, rows, kv_len))


def _crossing(low: int, high: int, gain: float, loss: float) -> int:
    """Where the gain is used up between two sizes, on a straight line."""
    if gain <= 0.0 or loss >= 0.0:
        return low
    return low + int((high - low) * gain / (gain - loss))


def schedule_of(sizes: Sequence[int], lens: Sequence[int]) -> BsSchedule:
    """A size's length holds for the rows above the size before; the last one's for all that are more."""
    last_rows, lengths = [], [lens[0]]
    for before, length in zip(sizes, lens[1:], strict=False):
        if length != lengths[-1]:
            last_rows.append(before)
            lengths.append(length)
    return BsSchedule(tuple(last_rows), tuple(lengths))


def score(figures: ShapeFigures, sizes: Sequence[int], lens: Sequence[int], kv_len: float) -> float:
    """Mean logarithm of the rates; steps that are not prepared run plain."""
    pairs = zip(sizes, lens, strict=True)
    logs = [math.log(figures.rate(k if n <= figures.max_rows else 0, n, kv_len)) for n, k in pairs]
    return sum(logs) / len(logs)
