"""What decides the mode of a step on the running server, and how it is changed."""

from __future__ import annotations

import logging
from typing import Any, Final

from sglang.srt.configs.speculative_args import AUTO, Threshold
from sglang.srt.model_executor.step_plan import ExecutorInfo, RaggedSize
from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.controller import AutoController, CommittedStep
from sglang.srt.speculative.schedule import BsSchedule, ScheduleError, decide_by_schedule, parse_bs_schedule
from sglang.srt.speculative.toggle import (
    Decision,
    Policy,
    ThresholdError,
    ToggleInput,
    check_threshold,
)

logger = logging.getLogger(__name__)

THRESHOLD: Final = "speculative_disable_bs_threshold"
SCHEDULE: Final = "speculative_bs_schedule"
FIGURES_EVERY: Final = 16  # steps


class ModeError(ValueError):
    """A mode that can't be set; the message says what can."""


class ToggleSettings:
    """Either a threshold (a number or None), or ``auto``, or a schedule is in force."""

    def __init__(
        self,
        info: ExecutorInfo,
        policy: Policy,  # by thresholds
        auto: AutoController | None,  # None: nothing is known of what steps cost
    ) -> None:
        self.threshold: Threshold = None
        self.schedule: BsSchedule | None = None
        self.auto = auto
        self._auto_figures: dict[str, Any] | None = None
        self._num_untold = 0  # steps that are not in them
        self._info = info
        self._policy = policy
        self._num_steps = info.spec.num_steps if info.spec else 0
        self._ragged: dict[int, dict[int, list[RaggedSize]]] = {}  # draft length -> rows, ascending -> sizes
        for size in info.ragged_sizes:
            self._ragged.setdefault(size.draft_len, {}).setdefault(size.rows, []).append(size)
        self._most_rows = {draft_len: info.most_rows(draft_len) for draft_len in info.draft_lens}

    def begin(self, threshold: Threshold, schedule: str | None) -> None:
        """As the arguments say. They may name more requests than can ever run."""
        assert threshold != AUTO or self.auto is not None, "auto was asked for, and no cost is known"
        self.threshold = threshold
        self.schedule = None if schedule is None else parse_bs_schedule(schedule)

    @property
    def has_drafter(self) -> bool:
        return self._info.spec is not None

    @property
    def in_force(self) -> Threshold | BsSchedule:
        return self.threshold if self.schedule is None else self.schedule

    def figures(self) -> dict[str, Any]:
        """As the two flags would say it."""
        return {THRESHOLD: self.threshold, SCHEDULE: None if self.schedule is None else str(self.schedule)}

    def auto_figures(self, is_idle: bool) -> dict[str, Any] | None:
        """What ``auto`` believes; made anew every few steps only, and when there is nothing else to do."""
        if self.auto is not None and (is_idle or self._num_untold >= FIGURES_EVERY or not self._auto_figures):
            self._auto_figures, self._num_untold = self.auto.figures(), 0
        return self._auto_figures

    @property
    def tells_rows_apart(self) -> bool:
        """Whether ``observe`` wants to know what every row did."""
        return self.auto is not None and self.auto.tells_rows_apart

    # ---- asked for every step ------------------------------------------------------------------

    def prepared_lens(self, num_rows: int) -> tuple[int, ...]:
        """Draft lengths that have steps of so many rows, ascending."""
        return tuple(draft_len for draft_len, most in self._most_rows.items() if num_rows <= most)

    def ragged_sizes(self, num_rows: int) -> tuple[RaggedSize, ...]:
        """Steps for so many rows with draft lengths of their own, as few padded rows as there are: `auto` may
        choose one of them.
        """
        if self.threshold != AUTO or self.schedule is not None or not self._ragged:
            return ()
        if not self.tells_rows_apart:
            return ()
        sizes: list[RaggedSize] = []
        for by_rows in self._ragged.values():
            sizes += next((of for rows, of in by_rows.items() if rows >= num_rows), ())
        return tuple(sizes)

    def decide(self, state: AutoInput) -> Decision:
        if self.schedule is not None:
            return decide_by_schedule(state, self.schedule)
        if self.threshold == AUTO:
            assert self.auto is not None
            return self.auto.decide(state)
        num_accepting = int(sum(count for _, count in state.class_counts))
        return self._policy(
            ToggleInput(
                num_decoding=state.num_decoding,
                threshold=self.threshold,
                max_spec_rows=self._most_rows.get(state.num_steps, 0),
                num_steps=state.num_steps,
                num_capped_rows=state.num_decoding - num_accepting,
                spec_fits=state.num_steps in state.fitting_lens,
            )
        )

    def observe(self, step: CommittedStep) -> None:
        """In every mode, so that ``auto`` knows what there is to know when it is switched on."""
        if self.auto is not None:
            self.auto.observe(step)
            self._num_untold += 1

    # ---- changed ---------------------------------------------------------------------------------

    def set(self, wanted: dict[str, Any]) -> None:
        """Some of ``figures``' names. Raises ModeError, and then nothing has changed."""
        if not self.has_drafter:
            name = next(iter(wanted))
            raise ModeError(f"{name} needs a drafter: start the server with --speculative-algorithm")
        threshold, schedule = wanted.get(THRESHOLD), wanted.get(SCHEDULE)
        if schedule is None:
            if THRESHOLD not in wanted:
                raise ModeError(
                    f"{SCHEDULE} is ended by setting {THRESHOLD}: a number, auto or null (always)"
                )
            self.threshold, self.schedule = self._checked_threshold(threshold), None
        elif threshold is None:
            self.threshold, self.schedule = None, self._checked_schedule(schedule)
        else:
            raise ModeError(f"{THRESHOLD} and {SCHEDULE} both say when to speculate: set one of them")
        logger.info("set on the running server: %s", self.figures())

    def _checked_threshold(self, value: object) -> Threshold:
        if value == AUTO:
            if self.auto is None:
                raise ModeError(
                    f"{THRESHOLD} auto needs to know what steps cost: start the server with"
                    " --speculative-disable-bs-threshold auto, or give it --speculative-auto-table FILE"
                )
            return AUTO
        speculates = value is None or (isinstance(value, int) and value > 0)
        if speculates and self._num_steps not in self._most_rows:
            raise ModeError(
                f"{THRESHOLD} {value} needs steps of {self._num_steps} drafts, and those that were prepared"
                f" have {', '.join(map(str, self._most_rows))} (--speculative-bs-schedule); set 0, or another"
                f" {SCHEDULE}"
            )
        try:
            return check_threshold(value, self._most_rows.get(self._num_steps, 0), self.has_drafter)
        except ThresholdError as error:
            raise ModeError(str(error)) from error

    def _checked_schedule(self, value: object) -> BsSchedule:
        if not isinstance(value, str):
            raise ModeError(f"{SCHEDULE} must be a string, got {value!r}")
        try:
            schedule = parse_bs_schedule(value)
        except ScheduleError as error:
            raise ModeError(f"{SCHEDULE}: {error}") from error
        for draft_len in schedule.draft_lens:
            self._need(schedule, draft_len)
        return schedule

    def _need(self, schedule: BsSchedule, draft_len: int) -> None:
        """Steps of all the sizes that the schedule names; one without an end goes as far as there are any."""
        prepared = self._most_rows.get(draft_len, 0)
        wanted = min(schedule.max_rows_of(draft_len) or 1, self._info.num_slots)
        if wanted > prepared:
            have = ", ".join(f"{k} for {most}" for k, most in self._most_rows.items())
            raise ModeError(
                f"{SCHEDULE} needs steps of {draft_len} drafts for {wanted} requests, and it is prepared for"
                f" these drafts and at most so many requests: {have}"
            )
