"""The policy of ``--speculative-disable-bs-threshold auto``: the most expected tokens per second.

A pure function of what the scheduler knows of a step and what is believed about costs and acceptance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from sglang.srt.model_executor.step_plan import RaggedSize
from sglang.srt.speculative.acceptance import ClassCounts
from sglang.srt.speculative.row_acceptance import DraftRow
from sglang.srt.speculative.toggle import Decision, Reason

LEAST_HOPE: Final = 0.005  # a probe must promise this much more than the best known choice
LEAST_CHARGE: Final = 0.01  # of a probe's time: none is free
# Draft lengths of the rows' own must promise so much more than the best common one: an H200 has shown a loss
# of 2.6 % where they promised 1 % more.
RAGGED_MARGIN: Final = 0.02


@dataclass(frozen=True, slots=True)
class AutoInput:
    """What the scheduler knows of the step it plans."""

    num_decoding: int
    class_counts: ClassCounts  # rows that accept drafts, by class; rows of draft_cap 0 are in none
    kv_tokens: int  # sum of the rows' KV lengths (bounds)
    num_steps: int  # the longest draft of this server; 0: it has no drafter
    prepared_lens: tuple[int, ...]  # draft lengths that have steps of so many rows, ascending
    fitting_lens: tuple[int, ...]  # those of them whose pages are there, with nothing evicted for drafts
    # Rows may have draft lengths of their own: what steps there are for so many, and the rows.
    ragged_sizes: tuple[RaggedSize, ...] = ()
    rows: Sequence[DraftRow] = ()


class Costs(Protocol):
    def both_seconds(self, draft_len: int, rows: int, kv_tokens: float) -> tuple[float, float]:
        """What such a step will take, and what it may take at best; infinite if nothing is known of it."""
        ...

    def ragged_seconds(self, size: RaggedSize, kv_tokens: float) -> float:
        """What a step whose rows have different draft lengths will take; infinite if it was not measured."""
        ...


class Acceptance(Protocol):
    def extra_tokens(self, counts: ClassCounts, longest: int) -> Sequence[float]:
        """[longest + 1] drafts expected to be accepted with 0, 1, … drafts, over these rows."""
        ...

    def most_extra_tokens(self, counts: ClassCounts, longest: int) -> Sequence[float]:
        """The same, if drafts are as good as what was seen leaves room for."""
        ...


class Rows(Protocol):
    """What every row of the step is expected to accept (``Sharing``)."""

    def extra_tokens(self) -> Sequence[float]:
        """[num_steps + 1] drafts expected to be accepted where all rows have 0, 1, … drafts."""
        ...

    def accepted(self, longest: int, num_drafts: int) -> float:
        """Those expected where so many are given out as well as it goes, at most ``longest`` to a row."""
        ...

    def drafts(self, longest: int, num_drafts: int) -> tuple[int, ...]:
        """Each row's."""
        ...


@dataclass(frozen=True, slots=True)
class Beliefs:
    costs: Costs
    acceptance: Acceptance
    probe_credit_s: float  # what probes may cost now; 0: none
    rows: Rows | None = None  # None: they are not told apart
    row_credit_s: float = 0.0  # what probes with draft lengths of the rows' own may cost now
    # What each row would accept if it were as good as what it showed leaves room for; asked for only where
    # such a probe can be paid.
    hopes: Callable[[], Rows] | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    decision: Decision
    charge_s: float = 0.0  # what a probe may cost at worst: to be taken off the credit
    rate: float = 0.0  # tokens per second of what would have been chosen instead of a probe


@dataclass(frozen=True, slots=True)
class _Common:
    """A step of one draft length."""

    draft_len: int
    tokens: float
    likely_s: float
    least_s: float

    @property
    def rate(self) -> float:
        return self.tokens / self.likely_s


@dataclass(frozen=True, slots=True)
class _Best:
    """What is chosen if nothing is tried out."""

    seconds: float
    rate: float
    draft_len: int
    size: RaggedSize | None

    def is_part_of(self, other: _Common) -> bool:
        """Whether every row's drafts are among the other's."""
        return self.draft_len < other.draft_len or (
            self.size is not None and self.draft_len == other.draft_len
        )


def decide_auto(state: AutoInput, beliefs: Beliefs) -> Decision:
    return choose(state, beliefs).decision


def choose(state: AutoInput, beliefs: Beliefs) -> Choice:
    held_back = _held_back(state)
    if held_back is not None:
        return Choice(Decision(0, held_back))
    commons = _commons(state, beliefs)
    first = commons[0]
    for one in commons[1:]:
        if one.rate > first.rate:  # of equals the shorter
            first = one
    best = _Best(first.likely_s, first.rate, first.draft_len, None)
    if beliefs.rows is not None:
        best = _ragged(state, beliefs, beliefs.rows, best)
    if beliefs.probe_credit_s > 0.0:
        probe = _probe(state, beliefs, commons, best)
        if probe is not None:
            return probe
    if beliefs.hopes is not None and beliefs.row_credit_s > 0.0:
        probe = _row_probe(state, beliefs, beliefs.hopes, best)
        if probe is not None:
            return probe
    if best.size is None:
        return Choice(Decision(best.draft_len, Reason.COST))
    assert beliefs.rows is not None
    drafts = beliefs.rows.drafts(best.draft_len, _num_drafts(best.size))
    return Choice(Decision(best.draft_len, Reason.COST, best.size, drafts))


def _held_back(state: AutoInput) -> Reason | None:
    """Why there is nothing to choose."""
    if state.num_steps == 0:
        return Reason.NO_DRAFTER
    if not state.prepared_lens:
        return Reason.BATCH_SIZE
    if not state.class_counts:
        return Reason.REQUEST
    return None if state.fitting_lens else Reason.MEMORY


def _commons(state: AutoInput, beliefs: Beliefs) -> list[_Common]:
    lens, rows = (0, *state.fitting_lens), state.num_decoding
    if beliefs.rows is None:
        extra = beliefs.acceptance.extra_tokens(state.class_counts, lens[-1])
    else:
        extra = beliefs.rows.extra_tokens()
    costs = beliefs.costs
    return [_Common(k, rows + extra[k], *costs.both_seconds(k, rows, state.kv_tokens)) for k in lens]


def _num_drafts(size: RaggedSize) -> int:
    """Those of the rows that are no padding, which take one token each."""
    return size.tokens - size.rows


def _ragged(state: AutoInput, beliefs: Beliefs, rows: Rows, common: _Best) -> _Best:
    """The best step whose rows have draft lengths of their own, if it is enough better; else ``common``."""
    best, to_beat = common, common.rate * (1.0 + RAGGED_MARGIN)
    for size, seconds in _ragged_costs(state, beliefs.costs):
        rate = _ragged_rate(state, rows, size, seconds)
        if rate > to_beat:
            best, to_beat = _Best(seconds, rate, size.draft_len, size), rate
    return best


def _ragged_costs(state: AutoInput, costs: Costs) -> list[tuple[RaggedSize, float]]:
    """The steps that the rows can fill and whose pages are there."""
    return [
        (size, costs.ragged_seconds(size, state.kv_tokens))
        for size in state.ragged_sizes
        if size.draft_len in state.fitting_lens and _num_drafts(size) <= state.num_decoding * size.draft_len
    ]


def _ragged_rate(state: AutoInput, rows: Rows, size: RaggedSize, seconds: float) -> float:
    return (state.num_decoding + rows.accepted(size.draft_len, _num_drafts(size))) / seconds


def _row_probe(state: AutoInput, beliefs: Beliefs, hopes: Callable[[], Rows], best: _Best) -> Choice | None:
    """The step with draft lengths of the rows' own that would be worth the most if every row were as good as
    it may be. Drafts of a common length tell rows apart too; but where only some rows accept much they cost
    so much more than they give that they are tried too seldom for any row to be known well enough.
    """
    least_s = state.num_decoding / best.rate  # what every step gives is worth so much
    payable = [
        (size, seconds)
        for size, seconds in _ragged_costs(state, beliefs.costs)
        if seconds - least_s <= beliefs.row_credit_s and size != best.size
    ]
    if not payable:
        return None
    rows, found = hopes(), None
    hope = _hoped_rate(state, rows, best) * (1.0 + RAGGED_MARGIN)
    for size, seconds in payable:
        rate = _ragged_rate(state, rows, size, seconds)
        if rate > hope:
            found, hope = (size, seconds), rate
    if found is None:
        return None
    size, seconds = found
    drafts = rows.drafts(size.draft_len, _num_drafts(size))
    decision = Decision(size.draft_len, Reason.PROBE, size, drafts)
    return Choice(decision, max(seconds - least_s, LEAST_CHARGE * seconds), best.rate)


def _hoped_rate(state: AutoInput, rows: Rows, best: _Best) -> float:
    """What is chosen would be better, too."""
    if best.size is not None:
        return _ragged_rate(state, rows, best.size, best.seconds)
    return (state.num_decoding + rows.extra_tokens()[best.draft_len]) / best.seconds


def _probe(state: AutoInput, beliefs: Beliefs, commons: Sequence[_Common], best: _Best) -> Choice | None:
    """The other common length that would be worth the most if things were as good as they may be."""
    others = [
        one
        for one in commons
        if math.isfinite(one.likely_s) and (best.size is not None or one.draft_len != best.draft_len)
    ]
    charges = [_worst_loss(one, best) for one in others]
    if all(charge > beliefs.probe_credit_s for charge in charges):
        return None
    most = beliefs.acceptance.most_extra_tokens(state.class_counts, commons[-1].draft_len)
    found, hope = None, best.rate * (1.0 + LEAST_HOPE)
    for one, charge in zip(others, charges, strict=True):
        # A shorter draft accepts what the first drafts of the best one do: only its time is in doubt.
        hoped = one.tokens
        if best.is_part_of(one):
            hoped = max(hoped, state.num_decoding + most[one.draft_len])
        if hoped > hope * one.least_s:
            found, hope = Choice(Decision(one.draft_len, Reason.PROBE), charge), hoped / one.least_s
    return None if found is None or found.charge_s > beliefs.probe_credit_s else found


def _worst_loss(probe: _Common, best: _Best) -> float:
    """Seconds that the probe takes and the best choice would not have taken for the same tokens.

    A longer draft gives at least what the best one would have given: at worst its extra time is lost.
    """
    saved_s = best.seconds if best.is_part_of(probe) else probe.tokens / best.rate
    return max(probe.likely_s - saved_s, LEAST_CHARGE * probe.likely_s)
