"""Taking a running request's pages when decoding has run out of them."""

from __future__ import annotations

from sglang.srt.managers.finish import Finisher, pool_is_full
from sglang.srt.managers.page_budget import PageBudget
from sglang.srt.managers.release import Releaser
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.stats import StatsRecorder


class Retractor:
    def __init__(
        self,
        table: RequestTable,
        budget: PageBudget,
        releaser: Releaser,
        finisher: Finisher,
        stats: StatsRecorder,
    ) -> None:
        self._table = table
        self._budget = budget
        self._releaser = releaser
        self._finisher = finisher
        self._stats = stats

    def retract_one(self) -> None:
        """No step is in flight: the victim's length is exact and its pages are free at once.

        It comes back as a prefill of all its known ids, before everything that waits. A request
        that has the device to itself cannot be helped that way and ends with an error, unless it
        holds pages whose contents the cache has too: coming back, it uses the cache's.
        """
        running = self._table.running()
        if len(running) == 1 and not running[0].duplicate_pages:
            self._finisher.finish(running[0], pool_is_full(running[0], self._budget.token_capacity))
            return
        self.retract(min(running, key=_loss))

    def retract_all(self) -> None:
        """No step is in flight. They come back in the order in which they came."""
        for request in sorted(self._table.running(), key=lambda r: r.arrival, reverse=True):
            self.retract(request)

    def retract(self, victim: Request) -> None:
        """No step is in flight."""
        self._table.requeue_front(victim)
        victim.counters.num_retractions += 1
        self._stats.retracted(victim.prompt_len, victim.num_outputs)
        self._releaser.release(victim, keep_prefix=True)


def _loss(request: Request) -> tuple[int, int, int, int]:
    """The lowest priority; then as upstream's ``length`` policy: fewest outputs, longest prompt, latest."""
    return (request.priority, request.num_outputs, -request.prompt_len, -request.arrival)
