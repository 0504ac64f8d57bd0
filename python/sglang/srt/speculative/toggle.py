"""Which mode a decode step runs in: a pure function of numbers the scheduler has.

The mode concerns one step alone. A request's state between steps does not know which mode made it,
so a change costs nothing and there is nothing to smooth: no hysteresis, no history, no clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from sglang.srt.model_executor.step_plan import RaggedSize


class Reason(StrEnum):
    """Why a step has its mode (and so, why it changed)."""

    NO_DRAFTER = "no_drafter"
    BATCH_SIZE = "batch_size"
    MANUAL = "manual"  # the threshold was changed by hand since the last decode step
    MEMORY = "memory"
    REQUEST = "request"  # every row is capped at 0 drafts
    COST = "cost"  # `auto`: the most expected tokens per second
    PROBE = "probe"  # `auto`: to see what another length is worth now


@dataclass(frozen=True, slots=True)
class ToggleInput:
    num_decoding: int  # rows planned to decode in this step; waiting and prefilling ones never count
    threshold: int | None  # more rows than this decode plainly; 0: never speculate; None: always
    max_spec_rows: int  # sizes for which speculative graphs exist; 0 without a drafter
    num_steps: int  # drafts of a speculative step
    num_capped_rows: int  # rows that accept no draft by their own wish
    spec_fits: bool  # the pages that only drafts need are there, with nothing evicted for them


@dataclass(frozen=True, slots=True)
class Decision:
    draft_len: int  # 0: plain
    reason: Reason
    size: RaggedSize | None = None  # rows have draft lengths of their own; None: all have ``draft_len``
    row_drafts: tuple[int, ...] = ()  # these; () without a size


Policy = Callable[[ToggleInput], Decision]


def decide_by_threshold(state: ToggleInput) -> Decision:
    """The policy of --speculative-disable-bs-threshold."""
    if state.num_steps == 0:
        return Decision(0, Reason.NO_DRAFTER)
    too_many = state.threshold is not None and state.num_decoding > state.threshold
    if too_many or state.num_decoding > state.max_spec_rows:
        return Decision(0, Reason.BATCH_SIZE)
    if state.num_capped_rows >= state.num_decoding:
        return Decision(0, Reason.REQUEST)
    if not state.spec_fits:
        return Decision(0, Reason.MEMORY)
    return Decision(state.num_steps, Reason.BATCH_SIZE)


class SwitchCounter:
    """Counts changes of mode between decode steps that were carried out."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}  # (to, reason) -> how often
        self._last: Decision | None = None
        self._last_mode: object = None

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def record(self, decision: Decision, mode: object) -> tuple[str, str] | None:
        """(to, reason) if this step's mode differs from the one before.

        ``mode``: the threshold (or ``auto``, or the schedule) that decided it.
        """
        last, self._last = self._last, decision
        last_mode, self._last_mode = self._last_mode, mode
        if last is None or (last.draft_len > 0) == (decision.draft_len > 0):
            return None
        to = "spec" if decision.draft_len else "plain"
        # What held speculation back is what its return is about.
        cause = last.reason if decision.draft_len else decision.reason
        if Reason.PROBE in (last.reason, decision.reason):
            cause = Reason.PROBE  # there and back
        if mode != last_mode and cause is Reason.BATCH_SIZE:
            cause = Reason.MANUAL
        switch = (to, str(cause))
        self.counts[switch] = self.counts.get(switch, 0) + 1
        return switch


class ThresholdError(ValueError):
    """A threshold that cannot be used; the message says what can be."""


def check_threshold(value: object, max_spec_rows: int, has_drafter: bool) -> int | None:
    """The value of ``speculative_disable_bs_threshold`` given at run time."""
    name = "speculative_disable_bs_threshold"
    if not has_drafter:
        raise ThresholdError(f"{name} needs a drafter: start the server with --speculative-algorithm")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ThresholdError(
            f"{name} must be an integer >= 0 (0: never speculate) or null (always speculate), got {value!r}"
        )
    if value > max_spec_rows:
        raise ThresholdError(
            f"{name} {value} needs speculative steps of {value} rows, but they were prepared for at most "
            f"{max_spec_rows} (--speculative-capture-max-bs); give 0 to {max_spec_rows} or null"
        )
    return value
