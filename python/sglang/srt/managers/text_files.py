"""Files about requests: one line for each (--export-metrics-to-file), and the dump when the server fails.

A disk that is full costs lines, and no request: it is said once in the log.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import deque
from pathlib import Path
from typing import Any, Final

from sglang.srt.managers.text_observers import EndsOnly, outcome_of, parameters_of
from sglang.srt.managers.text_request import Sample

logger = logging.getLogger(__name__)

_DUMPED_S: Final = 300.0  # finished requests of so long before a crash are in the dump, as SGLang has it
_MOST_DUMPED: Final = 10_000


class RequestFile(EndsOnly):
    """A file an hour, ``sglang-request-metrics-YYYYMMDD_HH.log``, of JSON lines."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned = False

    def ended(self, sample: Sample) -> None:
        if sample.request.no_logs:
            return
        now = sample.finished_ts or time.time()
        line = {"timestamp": now, "request_parameters": parameters_of(sample), **outcome_of(sample)}
        name = time.strftime("sglang-request-metrics-%Y%m%d_%H.log", time.localtime(now))
        try:
            with (self._folder / name).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                logger.error("--export-metrics-to-file: %s; lines are lost until it can be written", error)
            self._has_warned = True


class CrashDump(EndsOnly):
    """Keeps what runs and what has ended lately; nothing is written unless the server fails."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, Sample] = {}
        # When, and what is written of it: log-probabilities and hidden states may be large.
        self._ended: deque[tuple[float, dict[str, Any]]] = deque(maxlen=_MOST_DUMPED)

    def received(self, sample: Sample) -> None:
        self._running[sample.rid] = sample

    def ended(self, sample: Sample) -> None:
        self._running.pop(sample.rid, None)
        now = sample.finished_ts or 0.0
        self._ended.append((now, _whole(sample)))
        while self._ended[0][0] < now - _DUMPED_S:
            self._ended.popleft()

    def content(self, reason: str, server: dict[str, Any]) -> dict[str, Any]:
        """Taken before the running requests are told of the failure."""
        return {
            "reason": reason,
            "time": time.time(),
            "server_args": server,
            "running": [_whole(sample) for sample in self._running.values()],
            "finished": [whole for _, whole in self._ended],
        }

    def write(self, content: dict[str, Any]) -> Path | None:
        """The file; None if there is none: then the log says why."""
        stamp = time.strftime("%Y%m%d_%H%M%S", time.localtime(content["time"]))
        path = self._folder / f"crash_dump_{stamp}_{os.getpid()}.json"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
        except OSError as error:
            logger.error("--crash-dump-folder: nothing was written: %s", error)
            return None
        logger.error(
            "The %d running requests, and %d that ended before, are in %s",
            len(content["running"]),
            len(content["finished"]),
            path,
        )
        return path


def _whole(sample: Sample) -> dict[str, Any]:
    figures = {**outcome_of(sample), "created_ts": sample.created_ts}
    if sample.request.no_logs:
        return figures
    return {
        **figures,
        "prompt": sample.request.prompt,
        "sampling_params": parameters_of(sample),
        "text": sample.text,
        "output_ids": sample.output_ids,
    }
