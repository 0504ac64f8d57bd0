"""How a request gives back what it holds: one way, for finish, abort and retraction alike.

The prefix goes to the cache at once (a step in flight writes only behind it). Pages, lock and slot
go back when the last step that has a row of the request has been committed.
"""

from __future__ import annotations

from sglang.srt.managers.page_budget import PageBudget
from sglang.srt.managers.request import Request
from sglang.srt.mem_cache.prefix_cache import PrefixCache, prefix_keys
from sglang.srt.mem_cache.slot_allocator import SlotAllocator


class Releaser:
    def __init__(
        self, budget: PageBudget, slots: SlotAllocator, cache: PrefixCache, has_drafter: bool
    ) -> None:
        self._budget = budget
        self._slots = slots
        self._cache = cache
        self._has_drafter = has_drafter

    def share_prefix(self, request: Request) -> None:
        """Offer the request's complete pages to the cache; it goes on using them."""
        num_pages = self._cacheable_len(request) // self._budget.page_size
        if num_pages <= request.num_cache_pages:
            return
        assert request.cache_handle is not None
        keys = prefix_keys(request.ids, num_pages * self._budget.page_size, self._has_drafter)
        insertion = self._cache.insert(keys, request.pages[:num_pages], request.cache_handle, request.salt)
        request.cache_handle = insertion.handle
        request.duplicate_pages += request.pages[request.num_cache_pages : insertion.first_adopted]
        request.num_cache_pages = max(request.num_cache_pages, insertion.end_adopted)

    def _cacheable_len(self, request: Request) -> int:
        # Not the allocated length, and not the committed one alone: tokens cut off by a stop string
        # are committed too. With a drafter the last place's pair may hold a token cut off.
        known = min(request.kv_committed_len, len(request.ids))
        return max(0, known - 1) if self._has_drafter else known

    def release(self, request: Request, keep_prefix: bool) -> None:
        """The request has left the table. ``keep_prefix`` False: its KV is not to be trusted."""
        if request.slot == 0:
            return
        if keep_prefix:
            self.share_prefix(request)
        if not request.num_in_flight:
            self.give_back(request)

    def give_back(self, request: Request) -> None:
        """No step in flight refers to the request any more."""
        assert not request.num_in_flight and request.slot and request.cache_handle is not None
        self._budget.free(request.pages[request.num_cache_pages :])
        self._budget.free(request.duplicate_pages)
        self._cache.unlock(request.cache_handle)
        self._slots.free(request.slot)
        request.slot = 0
        request.pages, request.duplicate_pages = [], []
        request.kv_allocated_len = request.kv_committed_len = request.kv_len_bound = 0
        request.num_cache_pages = 0
        request.cache_handle = None
