"""Pages as the planner sees them: free ones, and ones that the prefix cache would give up."""

from __future__ import annotations

from collections.abc import Iterable

from sglang.srt.managers.request import Request
from sglang.srt.mem_cache.page_allocator import PageAllocator
from sglang.srt.mem_cache.prefix_cache import PrefixCache
from sglang.srt.model_executor.step_plan import PageWrite

# Old prefixes are evicted in batches: this part of the pool, but not more than so many tokens, as soon
# as less than half a batch would stay free. Page by page, a server whose cache is full would never have
# a free page, and so never one for drafts, which may not evict.
EVICTION_FRACTION = 32
EVICTION_MAX_TOKENS = 512


class PageBudget:
    def __init__(self, allocator: PageAllocator, cache: PrefixCache, page_size: int) -> None:
        self.page_size = page_size
        self._allocator = allocator
        self._cache = cache
        self._batch = min(allocator.num_pages // EVICTION_FRACTION, EVICTION_MAX_TOKENS // page_size)
        self.num_evicted = 0  # pages, over the life of the server

    @property
    def num_total(self) -> int:
        return self._allocator.num_pages

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_available(self) -> int:
        return self._allocator.num_free + self._cache.num_evictable_pages

    @property
    def num_used_tokens(self) -> int:
        return (self.num_total - self.num_available) * self.page_size

    @property
    def num_evictable_tokens(self) -> int:
        return self._cache.num_evictable_pages * self.page_size

    @property
    def token_capacity(self) -> int:
        return self.num_total * self.page_size

    def pages_for(self, kv_len: int) -> int:
        return -(-kv_len // self.page_size)

    def missing(self, request: Request, kv_len: int) -> int:
        """Pages to add so that the request reaches ``kv_len``."""
        return max(0, self.pages_for(kv_len) - len(request.pages))

    def extend(self, request: Request, kv_len: int) -> PageWrite | None:
        """Give the request pages up to ``kv_len``; they must be free (``make_room``)."""
        if kv_len <= request.kv_allocated_len:
            return None
        count, start = self.missing(request, kv_len), len(request.pages)
        added = self._allocator.allocate(count)
        request.pages += added
        request.kv_allocated_len = len(request.pages) * self.page_size
        return PageWrite(slot=request.slot, start=start, pages=tuple(added))

    def make_room(self, count: int) -> None:
        """Evict until ``count`` pages are free, and a few to spare."""
        free = self._allocator.num_free
        if free < count + self._batch // 2:
            evicted = self._cache.evict(count + self._batch - free)
            self.num_evicted += len(evicted)
            self._allocator.free(evicted)

    def free(self, pages: Iterable[int]) -> None:
        self._allocator.free(pages)
