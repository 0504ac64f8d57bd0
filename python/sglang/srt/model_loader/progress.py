"""How far the loading of weights is: a bar on a terminal, else a line in the log every tenth."""

from __future__ import annotations

import logging
import sys
import time
from threading import Lock
from typing import Final

from tqdm import tqdm

logger = logging.getLogger(__name__)

QUIET_S: Final = 2.0
"""Between two lines, and before the first one: small models need none."""


class LoadProgress:
    """Told by several threads."""

    def __init__(self, total_bytes: int, shown: bool = True) -> None:
        self._total = total_bytes
        self._done = self._tenths = 0
        self._lock = Lock()
        self._began = self._said = time.monotonic()
        self._logs = shown and not sys.stderr.isatty()
        self._bar = tqdm(
            total=total_bytes, desc="Loading weights", unit="B", unit_scale=True, unit_divisor=1024,
            delay=QUIET_S, disable=not shown or self._logs, leave=False,
        )  # fmt: skip

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._bar.update(num_bytes)
            tenths = 10 * self._done // max(self._total, 1)
            if self._logs and tenths > self._tenths and time.monotonic() - self._said >= QUIET_S:
                self._tenths, self._said = tenths, time.monotonic()
                logger.info(
                    "loading weights: %d %% of %.1f GiB, %.1f s",
                    10 * tenths, self._total / 2**30, self._said - self._began,
                )  # fmt: skip

    def close(self) -> None:
        self._bar.close()
