"""Responses that may be asked for again. They are kept in memory, and forgotten when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from sglang.srt.entrypoints.responses.run import ResponseRun

MOST_RESPONSES: Final = 1000
MOST_BYTES: Final = 256 << 20


class ResponseStore:
    """What was used longest ago goes first; what still runs stays."""

    def __init__(self, most_responses: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most_responses = most_responses
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[ResponseRun, int]] = OrderedDict()
        self._num_bytes = 0

    def put(self, run: ResponseRun) -> None:
        """Again when it has grown. One too large for the store is not kept."""
        self.remove(run.asked.id)
        size = run.num_bytes()
        self._kept[run.asked.id] = (run, size)
        self._num_bytes += size
        self._trim()

    def get(self, response_id: str) -> ResponseRun | None:
        found = self._kept.get(response_id)
        if found is None:
            return None
        self._kept.move_to_end(response_id)
        return found[0]

    def remove(self, response_id: str) -> ResponseRun | None:
        run, size = self._kept.pop(response_id, (None, 0))
        self._num_bytes -= size
        return run

    def _trim(self) -> None:
        for response_id, (run, _) in list(self._kept.items()):
            if len(self._kept) <= self._most_responses and self._num_bytes <= self._most_bytes:
                return
            if run.has_ended:
                self.remove(response_id)
