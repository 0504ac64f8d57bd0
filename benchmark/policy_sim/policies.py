"""What the simulator asks: the interface of a policy, the fixed ones, and ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sglang.srt.model_executor.step_plan import RaggedSize
from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.controller import PROBE_FRACTION, AutoController, ClassTally, CommittedStep
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.row_acceptance import Outcomes
from sglang.srt.speculative.schedule import BsSchedule
from sglang.srt.speculative.toggle import Decision


@dataclass(frozen=True, slots=True)
class SimRow:
    """What may be known of a running request."""

    slot: int
    arrival: int
    draft_class: str
    draft_cap: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """What may be known of a step when it is planned."""

    num_rows: int
    class_counts: tuple[tuple[str, float], ...]
    kv_tokens: int
    draft_lens: tuple[int, ...]  # that have steps of so many rows, without 0
    ragged_sizes: tuple[RaggedSize, ...] = ()  # steps for so many with draft lengths of their own
    rows: Sequence[SimRow] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """A step as it was carried out."""

    draft_len: int
    num_rows: int
    kv_tokens: int
    seconds: float
    accepted: np.ndarray  # [rows] drafts accepted
    classes: np.ndarray  # [rows] index into class_names
    class_names: tuple[str, ...]
    rows: Sequence[SimRow] = ()
    row_drafts: tuple[int, ...] = ()  # where rows had draft lengths of their own
    is_new: np.ndarray | None = None  # [rows] bool; with row_drafts

    def correct_by_depth(self, of_class: int | None = None) -> tuple[int, ...]:
        """Rows that accepted drafts 1, 2, …"""
        accepted = self.accepted if of_class is None else self.accepted[self.classes == of_class]
        counts = np.bincount(accepted, minlength=self.draft_len + 1)
        return tuple(int(n) for n in counts[::-1].cumsum()[::-1][1:])


class Policy(Protocol):
    def choose(self, view: View) -> int | Decision:
        """A draft length, or where rows have their own a decision that says which."""
        ...

    def observe(self, outcome: Outcome) -> None: ...


class Threshold:
    """``--speculative-disable-bs-threshold N``; 0 is plain decoding, None always speculates."""

    def __init__(self, rows: int | None, draft_len: int) -> None:
        self._rows = rows
        self._draft_len = draft_len

    def choose(self, view: View) -> int:
        speculates = self._rows is None or view.num_rows <= self._rows
        return self._draft_len if speculates and self._draft_len in view.draft_lens else 0

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


class Schedule:
    """``--speculative-bs-schedule``."""

    def __init__(self, schedule: BsSchedule) -> None:
        self._schedule = schedule

    def choose(self, view: View) -> int:
        wanted = self._schedule.draft_len(view.num_rows)
        return wanted if wanted in view.draft_lens else 0

    def observe(self, outcome: Outcome) -> None:
        """Learns nothing."""


class Auto:
    """``--speculative-disable-bs-threshold auto``: the server's own code."""

    def __init__(
        self, table: CostTable, num_steps: int, probe_fraction: float = PROBE_FRACTION, num_slots: int = 0
    ) -> None:
        """``num_slots``: of rows that may have draft lengths of their own."""
        self.controller = AutoController(table, num_steps, probe_fraction=probe_fraction, num_slots=num_slots)
        self._num_steps = num_steps
        self._decision: Decision | None = None

    def choose(self, view: View) -> int | Decision:
        self._decision = self.controller.decide(
            AutoInput(
                num_decoding=view.num_rows,
                class_counts=view.class_counts,
                kv_tokens=view.kv_tokens,
                num_steps=self._num_steps,
                prepared_lens=view.draft_lens,
                fitting_lens=view.draft_lens,
                ragged_sizes=view.ragged_sizes if self.controller.tells_rows_apart else (),
                rows=view.rows if self.controller.tells_rows_apart and view.ragged_sizes else (),
            )
        )
        return self._decision.draft_len if self._decision.size is None else self._decision

    def observe(self, outcome: Outcome) -> None:
        assert self._decision is not None
        step = CommittedStep(
            self._decision, outcome.num_rows, outcome.kv_tokens, outcome.seconds, _tallies(outcome),
            _outcomes(outcome) if self.controller.tells_rows_apart and outcome.draft_len else None,
        )  # fmt: skip
        self.controller.observe(step)


def _outcomes(outcome: Outcome) -> Outcomes:
    drafts = outcome.row_drafts or (outcome.draft_len,) * outcome.num_rows
    return Outcomes(list(outcome.rows), list(drafts), outcome.accepted.tolist())


def _tallies(outcome: Outcome) -> tuple[ClassTally, ...]:
    if outcome.draft_len == 0:
        return ()
    if outcome.row_drafts:
        return _tallies_of_new(outcome)
    rows = np.bincount(outcome.classes, minlength=len(outcome.class_names))
    return tuple(
        ClassTally(name, (int(rows[index]),) * outcome.draft_len, outcome.correct_by_depth(index))
        for index, name in enumerate(outcome.class_names)
        if rows[index]
    )


def _tallies_of_new(outcome: Outcome) -> tuple[ClassTally, ...]:
    """As the server counts where rows have draft lengths of their own: what was tried, of new requests."""
    assert outcome.is_new is not None
    found, drafts = [], np.array(outcome.row_drafts)  # [rows]
    depths = range(1, outcome.draft_len + 1)
    for index, name in enumerate(outcome.class_names):
        chosen = outcome.is_new & (outcome.classes == index)
        given, accepted = drafts[chosen], outcome.accepted[chosen]
        if len(given):
            came = tuple(int(((given >= d) & (accepted >= d - 1)).sum()) for d in depths)
            found.append(ClassTally(name, came, tuple(int((accepted >= d).sum()) for d in depths)))
    return tuple(found)


def best_schedule(table: CostTable, parts: Sequence[float], kv_per_row: int, max_rows: int) -> BsSchedule:
    """For each number of rows the length with the most tokens a second, at one acceptance and context."""
    lengths = [_best_length(table, parts, kv_per_row, rows) for rows in range(1, max_rows + 1)]
    ends = [n for n in range(1, max_rows) if lengths[n] != lengths[n - 1]]
    return BsSchedule(tuple(ends), tuple(lengths[end - 1] for end in [*ends, max_rows]))


def _best_length(table: CostTable, parts: Sequence[float], kv_per_row: int, rows: int) -> int:
    rates = []
    tokens, reached = 1.0, 1.0
    for draft_len in range(len(parts) + 1):
        if draft_len:
            reached *= parts[draft_len - 1]
            tokens += reached
        rates.append(tokens / table.seconds(draft_len, rows, kv_per_row * rows))
    return rates.index(max(rates))
