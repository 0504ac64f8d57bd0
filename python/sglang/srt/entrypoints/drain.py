"""An end that no client suffers from: what runs ends, what comes is refused, and then the server stops."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from sglang.srt.managers.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.05


class Drain:
    def __init__(
        self, manager: TokenizerManager, limit_s: float, refusal: str, stop: Callable[[], None]
    ) -> None:
        """``stop``: called once, when no request runs any more or the time is over."""
        self._manager = manager
        self._limit_s = limit_s
        self._refusal = refusal
        self._stop = stop
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Called again, it waits no longer."""
        if self._task is not None:
            self._task.cancel()
            self._stop()
            return
        self._manager.closing = self._refusal
        running = self._manager.num_running
        if running and self._limit_s:
            logger.info("Waiting up to %g s for %d requests to end.", self._limit_s, running)
        self._task = asyncio.get_running_loop().create_task(self._wait())

    async def _wait(self) -> None:
        deadline = time.monotonic() + self._limit_s
        while self._manager.num_running and self._manager.failure is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self._stop()
