"""A request that waits may take the place of running ones of a much lower priority."""

from __future__ import annotations

from sglang.srt.managers.admission import PrefillPlanner
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.retraction import Retractor


class Preemptor:
    def __init__(
        self, table: RequestTable, prefill: PrefillPlanner, retractor: Retractor, threshold: int | None
    ) -> None:
        """``threshold`` None: what runs goes on."""
        self._table = table
        self._prefill = prefill
        self._retractor = retractor
        self._threshold = threshold

    def make_way(self, step_in_flight: bool) -> bool:
        """For the request that is next, if enough can give way. False: a step must be committed first.

        Those that give way come back as retracted ones do.
        """
        if self._threshold is None:
            return True
        while self._table.waiting and self._table.num_running:
            request = self._table.waiting[0]
            if self._prefill.has_room(request):
                return True
            victims = self._victims(request, self._threshold)
            if not victims or not self._prefill.has_room(request, victims):
                return True
            if step_in_flight:
                return False
            self._retractor.retract(victims[0])
        return True

    def _victims(self, request: Request, threshold: int) -> list[Request]:
        """The lowest priority first, of one priority the latest."""
        lower = [r for r in self._table.running() if request.priority - r.priority > threshold]
        return sorted(lower, key=lambda r: (r.priority, -r.arrival))
