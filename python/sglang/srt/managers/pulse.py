"""Whether the scheduler's loop moves, as another thread sees it; and what happens if it does not."""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

logger = logging.getLogger(__name__)

_LONGEST_SLEEP_S: Final = 1.0


class Pulse:
    """Written by the loop: two assignments a turn."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_turns = 0  # that have ended
        self._since: float | None = None  # when the turn began; None: it waits for messages
        self._clock = clock

    def begin(self) -> None:
        self._since = self._clock()

    def end(self) -> None:
        self.num_turns += 1
        self._since = None

    @property
    def turn_s(self) -> float:
        """How long the turn that is under way has taken."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def figures(self) -> dict[str, Any]:
        return {"loop_turns": self.num_turns, "loop_turn_s": round(self.turn_s, 3)}


class Watchdog:
    """A turn of more than ``soft_s`` is reported once, with every thread's stack; of more than ``hard_s``,
    the process is ended.
    """

    def __init__(
        self,
        pulse: Pulse,
        hard_s: float | None,
        soft_s: float | None,
        on_hang: Callable[[str], None],
        dump: Callable[[], None] | None = None,
    ) -> None:
        self._pulse = pulse
        self._hard_s = hard_s
        self._soft_s = soft_s
        self._on_hang = on_hang
        self._dump = dump or _dump_stacks
        self._reported_turn = -1

    def start(self) -> None:
        limits = [limit for limit in (self._hard_s, self._soft_s) if limit is not None]
        if limits:
            sleep_s = min(_LONGEST_SLEEP_S, min(limits) / 4)
            threading.Thread(target=self._run, args=(sleep_s,), name="watchdog", daemon=True).start()

    def _run(self, sleep_s: float) -> None:
        while not self.check():
            time.sleep(sleep_s)

    def check(self) -> bool:
        """Whether it is over."""
        turn, turn_s = self._pulse.num_turns, self._pulse.turn_s
        if self._hard_s is not None and turn_s > self._hard_s:
            message = f"a step has not ended for more than {self._hard_s:g} s (--watchdog-timeout)"
            self._report(turn, message)
            self._on_hang(message)
            return True
        if self._soft_s is not None and turn_s > self._soft_s:
            self._report(
                turn, f"a step has not ended for more than {self._soft_s:g} s (--soft-watchdog-timeout)"
            )
        return False

    def _report(self, turn: int, message: str) -> None:
        if turn != self._reported_turn:
            self._reported_turn = turn
            logger.error("Watchdog: %s. Where every thread is:", message)
            self._dump()


def _dump_stacks() -> None:
    with suppress(OSError, ValueError):  # a log that can't be written keeps nobody from ending
        faulthandler.dump_traceback(sys.stderr, all_threads=True)
