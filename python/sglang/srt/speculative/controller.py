"""What ``auto`` remembers from step to step: costs, acceptance, and what probes may still cost.

The scheduler owns one, asks it when it plans a decode step and tells it what each committed one was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from sglang.srt.speculative.acceptance import AcceptanceEstimate
from sglang.srt.speculative.auto import AutoInput, Beliefs, Choice, choose
from sglang.srt.speculative.cost_model import CostModel
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.row_acceptance import Outcomes, RowAcceptance
from sglang.srt.speculative.row_credit import RowCredit
from sglang.srt.speculative.toggle import Decision, Reason

PROBE_FRACTION: Final = 0.003  # of the time of steps that are no probes
MOST_CREDIT_STEPS: Final = 16.0  # credit that is kept, in steps of the present length
LOOK_EVERY: Final = 8  # steps until a probe with lengths of the rows' own is looked for again: it takes time


@dataclass(frozen=True, slots=True)
class ClassTally:
    """Rows of one class in a speculative step."""

    name: str
    # Rows that could accept a draft at depth 1, 2, …; where they have different numbers of drafts, those of
    # them that had accepted the ones before it.
    proposed_by_depth: tuple[int, ...]
    correct_by_depth: tuple[int, ...]  # rows that did


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A decode step that was carried out (no mixed one)."""

    decision: Decision
    num_rows: int  # as planned, rows of requests that ended meanwhile included: the device ran them
    kv_tokens: int  # as given to ``decide``
    device_time_s: float
    tallies: tuple[ClassTally, ...] = ()  # () of a plain step
    outcomes: Outcomes | None = None  # of a speculative step's rows, where they are told apart


class AutoController:
    def __init__(
        self,
        table: CostTable,
        num_steps: int,
        prior: Mapping[str, Sequence[float]] | None = None,
        probe_fraction: float = PROBE_FRACTION,
        num_slots: int = 0,
    ) -> None:
        """``num_slots``: of an executor whose rows may have draft lengths of their own; 0: they have none."""
        self._costs = CostModel(table)
        self._acceptance = AcceptanceEstimate(num_steps, prior)
        self._rows = RowAcceptance(num_slots, num_steps) if num_slots else None
        self._num_ragged = 0
        self._row_credit = RowCredit(probe_fraction)
        self._look_in = 0  # steps
        self._probe_fraction = probe_fraction
        self._credit_s = 0.0
        self._charged_s = 0.0
        self._num_probes = 0

    @property
    def tells_rows_apart(self) -> bool:
        """Whether it wants to know what every row did."""
        return self._rows is not None

    def decide(self, state: AutoInput) -> Decision:
        beliefs = Beliefs(self._costs, self._acceptance, self._credit_s)
        if self._rows is not None and state.rows:
            parts = self._acceptance.parts
            beliefs = replace(beliefs, rows=self._rows.sharing(state.rows, parts))
            self._look_in -= 1
            if self._look_in < 0:
                hopes = partial(self._rows.hopes, state.rows, parts)
                beliefs = replace(beliefs, row_credit_s=self._row_credit.seconds, hopes=hopes)
        choice = choose(state, beliefs)
        if beliefs.hopes is not None:
            is_probe = choice.decision.reason is Reason.PROBE
            self._look_in = 0 if is_probe else LOOK_EVERY - 1
        self._num_ragged += choice.decision.size is not None
        if choice.decision.reason is Reason.PROBE:  # paid when planned: steps overlap
            self._pay(choice)
        return choice.decision

    def _pay(self, probe: Choice) -> None:
        self._charged_s += probe.charge_s
        self._num_probes += 1
        if probe.decision.size is None:
            self._credit_s -= probe.charge_s
        else:
            self._row_credit.pay(probe)

    def observe(self, step: CommittedStep) -> None:
        decision, seconds = step.decision, step.device_time_s
        self._costs.observe(decision.draft_len, step.num_rows, step.kv_tokens, seconds, decision.size)
        self._acceptance.step()
        if self._rows is not None:
            self._rows.step()
            if step.outcomes is not None:
                self._rows.observe(step.outcomes)
        for tally in step.tallies:
            self._acceptance.observe(tally.name, tally.proposed_by_depth, tally.correct_by_depth)
        if decision.reason is not Reason.PROBE:
            self._row_credit.add_time(seconds)
            if self._credit_s < MOST_CREDIT_STEPS * seconds:
                self._credit_s += self._probe_fraction * seconds
        elif decision.size is not None and step.outcomes is not None:
            num_accepted = sum(max(0, correct) for correct in step.outcomes.correct)
            self._charged_s -= self._row_credit.give_back(decision, num_accepted)

    def figures(self) -> dict[str, Any]:
        """For ``/server_info``."""
        figures = {
            "acceptance": self._acceptance.figures(),
            "cost_corrections": self._costs.figures(),
            "probes": self._num_probes,
            "probe_credit_s": self._credit_s,
            "probe_charged_s": self._charged_s,
        }
        if self._rows is None:
            return figures
        return figures | {
            "ragged_steps": self._num_ragged,
            "row_probes": self._row_credit.num_probes,
            "row_probe_credit_s": self._row_credit.seconds,
        }
