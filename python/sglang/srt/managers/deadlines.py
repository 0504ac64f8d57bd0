"""Requests that wait or run for too long: they end with status 503, and the others go on."""

from __future__ import annotations

from typing import Final

from sglang.srt.managers.finish import UNAVAILABLE, Finisher, abort_reason
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable

_CHECK_EVERY_S: Final = 0.1


class Deadlines:
    """A request waits until it is first admitted, and runs from then on (retracted or not)."""

    def __init__(
        self, table: RequestTable, finisher: Finisher, waiting_s: float | None, running_s: float | None
    ) -> None:
        self._table = table
        self._finisher = finisher
        self._waiting_s = waiting_s
        self._running_s = running_s
        self._next_check = 0.0

    @property
    def is_set(self) -> bool:
        return self._waiting_s is not None or self._running_s is not None

    def expire(self, now: float) -> None:
        if now < self._next_check:
            return
        self._next_check = now + _CHECK_EVERY_S
        for request in self._table.all():
            message = self._objection(request, now)
            if message:
                self._finisher.finish(request, abort_reason(message, UNAVAILABLE))

    def _objection(self, request: Request, now: float) -> str:
        admitted = request.counters.admitted_ts
        if admitted is None:
            limit, since, what = self._waiting_s, request.received_ts, "waited"
        else:
            limit, since, what = self._running_s, admitted, "run"
        if limit is None or now - since <= limit:
            return ""
        name = "WAITING" if admitted is None else "RUNNING"
        return f"the request has {what} for more than {limit:g} s (SGLANG_REQ_{name}_TIMEOUT)"
