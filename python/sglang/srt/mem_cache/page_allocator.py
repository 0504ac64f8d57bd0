"""The free list of KV pages. Pure bookkeeping: who shares a page is the prefix cache's affair."""

from __future__ import annotations

from collections.abc import Iterable


class PageAllocator:
    """Pages ``1 … num_pages`` (page 0 is the pad page), handed out in a deterministic order."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages, 0, -1))  # a stack: page 1 is on top at the start
        self._is_free = bytearray([1]) * (num_pages + 1)
        self._is_free[0] = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        assert 0 <= count <= len(self._free), f"{count} pages asked for, {len(self._free)} are free"
        if count == 0:
            return []
        pages = self._free[: -count - 1 : -1]
        del self._free[-count:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert 0 < page <= self.num_pages and not self._is_free[page], f"page {page} freed twice"
            self._is_free[page] = 1
            self._free.append(page)

    def free_pages(self) -> list[int]:
        """A copy, for checks."""
        return list(self._free)
