"""The policy of ``--speculative-disable-bs-threshold auto``: the most expected tokens per second.

A pure function of what the scheduler knows of a step and what is believed about costs and acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sglang.srt.speculative.acceptance import ClassCounts
from sglang.srt.speculative.toggle import Decision, Reason

LEAST_HOPE: Final = 0.005  # a probe must promise this much more than the best known choice
LEAST_CHARGE: Final = 0.01  # of a probe's time: none is free


@dataclass(frozen=True, slots=True)
class AutoInput:
    """What the scheduler knows of the step it plans."""

    num_decoding: int
    class_counts: ClassCounts  # rows that accept drafts, by class; rows of draft_cap 0 are in none
    kv_tokens: int  # sum of the rows' KV lengths (bounds)
    num_steps: int  # the longest draft of this server; 0: it has no drafter
    prepared_lens: tuple[int, ...]  # draft lengths that have steps of so many rows, ascending
    fitting_lens: tuple[int, ...]  # those of them whose pages are there, with nothing evicted for drafts


class Costs(Protocol):
    def both_seconds(self, draft_len: int, rows: int, kv_tokens: float) -> tuple[float, float]:
        """What such a step will take, and what it may take at best; infinite if nothing is known of it."""
        ...


class Acceptance(Protocol):
    def extra_tokens(self, counts: ClassCounts, longest: int) -> Sequence[float]:
        """[longest + 1] drafts expected to be accepted with 0, 1, … drafts, over these rows."""
        ...

    def most_extra_tokens(self, counts: ClassCounts, longest: int) -> Sequence[float]:
        """The same, if drafts are as good as what was seen leaves room for."""
        ...


@dataclass(frozen=True, slots=True)
class Beliefs:
    costs: Costs
    acceptance: Acceptance
    probe_credit_s: float  # what probes may cost now; 0: none


@dataclass(frozen=True, slots=True)
class Choice:
    decision: Decision
    charge_s: float = 0.0  # what a probe may cost at worst: to be taken off the credit


def decide_auto(state: AutoInput, beliefs: Beliefs) -> Decision:
    return choose(state, beliefs).decision


def choose(state: AutoInput, beliefs: Beliefs) -> Choice:
    held_back = _held_back(state)
    if held_back is not None:
        return Choice(Decision(0, held_back))
    lens = (0, *state.fitting_lens)
    costs = [beliefs.costs.both_seconds(k, state.num_decoding, state.kv_tokens) for k in lens]
    extra = beliefs.acceptance.extra_tokens(state.class_counts, lens[-1])
    tokens = [state.num_decoding + extra[k] for k in lens]
    best, best_rate = 0, 0.0
    for index, (likely_s, _) in enumerate(costs):
        rate = tokens[index] / likely_s
        if rate > best_rate:  # of equals the shorter
            best, best_rate = index, rate
    if beliefs.probe_credit_s > 0.0:
        probe = _probe(state, beliefs, lens, costs, tokens, best)
        if probe is not None:
            return probe
    return Choice(Decision(lens[best], Reason.COST))


def _held_back(state: AutoInput) -> Reason | None:
    """Why there is nothing to choose."""
    if state.num_steps == 0:
        return Reason.NO_DRAFTER
    if not state.prepared_lens:
        return Reason.BATCH_SIZE
    if not state.class_counts:
        return Reason.REQUEST
    return None if state.fitting_lens else Reason.MEMORY


def _probe(
    state: AutoInput,
    beliefs: Beliefs,
    lens: Sequence[int],
    costs: Sequence[tuple[float, float]],
    tokens: Sequence[float],
    best: int,
) -> Choice | None:
    """The other length that would be worth the most if things were as good as they may be."""
    best_s = costs[best][0]
    best_rate = tokens[best] / best_s
    others = [index for index in range(len(lens)) if index != best and math.isfinite(costs[index][0])]
    charges = {i: _worst_loss(costs[i][0], tokens[i], best_s, best_rate, is_longer=i > best) for i in others}
    if all(charge > beliefs.probe_credit_s for charge in charges.values()):
        return None
    most = beliefs.acceptance.most_extra_tokens(state.class_counts, lens[-1])
    found, hope = best, best_rate * (1.0 + LEAST_HOPE)
    for index in others:
        # A shorter draft accepts what the first drafts of the best one do: only its time is in doubt.
        hoped = tokens[index] if index < best else max(tokens[index], state.num_decoding + most[lens[index]])
        least_s = costs[index][1]
        if hoped > hope * least_s:
            found, hope = index, hoped / least_s
    if found == best or charges[found] > beliefs.probe_credit_s:
        return None
    return Choice(Decision(lens[found], Reason.PROBE), charges[found])


def _worst_loss(probe_s: float, tokens: float, best_s: float, best_rate: float, is_longer: bool) -> float:
    """Seconds that the probe takes and the best choice would not have taken for the same tokens.

    A longer draft gives at least what the best one would have given: at worst its extra time is lost.
    """
    saved_s = best_s if is_longer else tokens / best_rate
    return max(probe_s - saved_s, LEAST_CHARGE * probe_s)
