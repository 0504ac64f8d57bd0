"""What probes may cost whose rows have draft lengths of their own.

Such a probe is charged with what it costs if nothing is accepted, and gets back what was accepted. So it is
repeated at once while its drafts pay, until the rows are known well enough for such steps to be chosen; and
where drafts don't pay, what is lost is a small part of the time.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from sglang.srt.speculative.auto import Choice
from sglang.srt.speculative.toggle import Decision

SHARE: Final = 1 / 6  # of what other probes may cost
FIRST_STEPS: Final = 2.0  # what a server begins with, in steps: or it would begin by waiting
MOST_STEPS: Final = 4.0  # that is kept
MOST_PLANNED: Final = 64  # probes; those that were never carried out are forgotten


class RowCredit:
    def __init__(self, probe_fraction: float) -> None:
        """``probe_fraction``: of the other steps' time, for other probes."""
        self._fraction = SHARE * probe_fraction
        self._credit_s: float | None = None  # None: nobody knows how long a step takes
        self._planned: deque[Choice] = deque(maxlen=MOST_PLANNED)
        self.num_probes = 0

    @property
    def seconds(self) -> float:
        return self._credit_s or 0.0

    def pay(self, probe: Choice) -> None:
        """When it is planned: steps overlap."""
        self._credit_s = self.seconds - probe.charge_s
        self._planned.append(probe)
        self.num_probes += 1

    def add_time(self, step_s: float) -> None:
        """Of a step that is no probe."""
        if self._fraction == 0.0:
            return
        if self._credit_s is None:
            self._credit_s = FIRST_STEPS * step_s
        elif self._credit_s < MOST_STEPS * step_s:
            self._credit_s += self._fraction * step_s

    def give_back(self, probe: Decision, num_accepted: int) -> float:
        """What the drafts of a probe were worth that was carried out, in seconds."""
        while self._planned:
            planned = self._planned.popleft()
            if planned.decision is probe:
                worth_s = min(planned.charge_s, num_accepted / planned.rate)
                self._credit_s = self.seconds + worth_s
                return worth_s
        return 0.0
