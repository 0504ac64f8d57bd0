from __future__ import annotations

import pytest

from sglang.srt.mem_cache.page_allocator import PageAllocator
from sglang.srt.mem_cache.slot_allocator import SlotAllocator


def test_pages_come_in_order_and_never_the_pad_page() -> None:
    pages = PageAllocator(5)
    assert pages.allocate(3) == [1, 2, 3]
    pages.free([2, 1])
    assert pages.num_free == 4
    assert pages.allocate(4) == [1, 2, 4, 5]
    assert pages.allocate(0) == []


def test_page_misuse_dies_loudly() -> None:
    pages = PageAllocator(3)
    (page,) = pages.allocate(1)
    pages.free([page])
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free([page])
    with pytest.raises(AssertionError, match="freed twice"):
        pages.free([0])
    with pytest.raises(AssertionError, match="4 pages asked for, 3 are free"):
        pages.allocate(4)


def test_the_lowest_free_slot_comes_first() -> None:
    slots = SlotAllocator(4)
    assert [slots.allocate() for _ in range(4)] == [1, 2, 3, 4]
    slots.free(3)
    slots.free(2)
    assert slots.is_free(2) and not slots.is_free(1) and not slots.is_free(0)
    assert slots.allocate() == 2
    with pytest.raises(AssertionError, match="freed twice"):
        slots.free(3)
