"""Published policies, from their descriptions and in our own words, on the same cost tables as ours.

Where a description leaves something open, the choice that favours it is taken, and said.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Final

from benchmark.policy_sim.policies import Outcome, View
from sglang.srt.speculative.cost_table import CostTable


class AcceptanceAverage:
    """SGLang's ``--speculative-adaptive`` (its documentation, "Adaptive speculative decoding").

    An average of the accepted drafts of a row, smoothed by 0.2 a step; after 10 steps, and then every 5,
    one candidate up or down towards round(average) + 1 drafts, with a margin of -0.25 downwards and 0
    upwards. It never decodes plainly and knows no costs. Its candidates, 1, 3 and 7 there, are here all
    lengths that exist.
    """

    SMOOTHING: Final = 0.2
    WARM_UP: Final = 10
    INTERVAL: Final = 5
    DOWN_MARGIN: Final = -0.25

    def __init__(self, lengths: Sequence[int], start: int) -> None:
        self._lengths = tuple(sorted(lengths))
        self._current = start
        self._average = float(start - 1)
        self._num_steps = 0

    def choose(self, view: View) -> int:
        return max((k for k in view.draft_lens if k <= self._current), default=0)

    def observe(self, outcome: Outcome) -> None:
        if outcome.draft_len == 0:
            return
        self._average += self.SMOOTHING * (float(outcome.accepted.mean()) - self._average)
        self._num_steps += 1
        if self._num_steps <= self.WARM_UP or self._num_steps % self.INTERVAL:
            return
        index = self._lengths.index(self._current)
        if index + 1 < len(self._lengths) and self._average > self._current - 0.5:
            self._current = self._lengths[index + 1]
        elif index and self._average <= self._lengths[index - 1] - 0.5 + self.DOWN_MARGIN:
            self._current = self._lengths[index - 1]


class Goodput:
    """SmartSpec (Liu et al., arXiv 2406.14066): the length with the most goodput.

    One moving average of the chance that a draft is accepted, common to all requests and depths, so that k
    drafts are expected to give (1 - a^(k+1)) / (1 - a) tokens; step times from an offline profile. Here that
    profile is the cost table itself, context length included (the paper fits a line). While it does not
    speculate it learns nothing: no probing is described.
    """

    def __init__(self, table: CostTable, start: float = 0.7, smoothing: float = 0.05) -> None:
        self._table = table
        self._chance = start
        self._smoothing = smoothing

    def choose(self, view: View) -> int:
        lens = (0, *view.draft_lens)
        return max(
            lens, key=lambda k: self._tokens(k) / self._table.seconds(k, view.num_rows, view.kv_tokens)
        )

    def _tokens(self, draft_len: int) -> float:
        return sum(self._chance**depth for depth in range(draft_len + 1))

    def observe(self, outcome: Outcome) -> None:
        if outcome.draft_len == 0:
            return
        accepted = int(outcome.accepted.sum())
        tried = accepted + int((outcome.accepted < outcome.draft_len).sum())
        self._chance += self._smoothing * (accepted / tried - self._chance)


class Ucb:
    """BanditSpec's UCBSpec (Hou et al., arXiv 2505.15141): upper confidence bounds over configurations.

    The arms are the draft lengths (0 among them), for the whole batch, as in the authors' code for lengths.
    The reward is a step's tokens a second over the most that plain steps of this size could give times
    the longest length: so batches of different sizes compare, which the paper does not need. With
    ``by_size`` there is one bandit for each power of two of rows.
    """

    def __init__(self, table: CostTable, by_size: bool) -> None:
        self._table = table
        self._by_size = by_size
        self._arms: dict[int, dict[int, tuple[int, float]]] = {}  # size -> length -> (pulls, mean reward)

    def choose(self, view: View) -> int:
        arms = self._bandit(view.num_rows)
        lens = (0, *view.draft_lens)
        for length in lens:
            if length not in arms:
                return length
        total = sum(pulls for pulls, _ in arms.values())
        return max(lens, key=lambda k: arms[k][1] + math.sqrt(2.0 * math.log(total) / arms[k][0]))

    def observe(self, outcome: Outcome) -> None:
        arms = self._bandit(outcome.num_rows)
        pulls, mean = arms.get(outcome.draft_len, (0, 0.0))
        reward = relative_rate(self._table, outcome)
        arms[outcome.draft_len] = (pulls + 1, mean + (reward - mean) / (pulls + 1))

    def _bandit(self, rows: int) -> dict[int, tuple[int, float]]:
        return self._arms.setdefault(rows.bit_length() if self._by_size else 0, {})


class Exp3:
    """BanditSpec's EXP3Spec (the same paper): exponential weights, for rewards that change.

    The same arms and rewards as `Ucb`; losses weighted by the chance of the arm, learning rate
    sqrt(log(arms) / (arms * t)).
    """

    def __init__(self, table: CostTable, seed: int) -> None:
        self._table = table
        self._losses: dict[int, float] = {}
        self._source = random.Random(f"exp3 {seed}")
        self._num_steps = 0
        self._chances: dict[int, float] = {}

    def choose(self, view: View) -> int:
        lens = (0, *view.draft_lens)
        for length in lens:
            self._losses.setdefault(length, 0.0)
        self._num_steps += 1
        rate = math.sqrt(math.log(len(lens) + 1) / (len(lens) * self._num_steps))
        least = min(self._losses[k] for k in lens)
        weights = [math.exp(-rate * (self._losses[k] - least)) for k in lens]
        self._chances = {k: weight / sum(weights) for k, weight in zip(lens, weights, strict=True)}
        return self._source.choices(lens, weights)[0]

    def observe(self, outcome: Outcome) -> None:
        loss = 1.0 - relative_rate(self._table, outcome)
        self._losses[outcome.draft_len] += loss / max(self._chances[outcome.draft_len], 1e-3)


def relative_rate(table: CostTable, outcome: Outcome) -> float:
    """Tokens a second as a part of what plain steps of this size give, times the longest length + 1."""
    tokens = outcome.num_rows + int(outcome.accepted.sum())
    plain_rate = outcome.num_rows / table.seconds(0, outcome.num_rows, outcome.kv_tokens)
    most = 1 + table.draft_lens[-1]
    return min(1.0, tokens / outcome.seconds / plain_rate / most)
