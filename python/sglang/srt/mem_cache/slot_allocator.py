"""The free list of slots (rows of the device state)."""

from __future__ import annotations

import heapq


class SlotAllocator:
    """Slots ``1 … num_slots`` (slot 0 is the padding slot); the lowest free one comes first."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(1, num_slots + 1))  # a sorted list is a heap
        self._is_free = bytearray([1]) * (num_slots + 1)
        self._is_free[0] = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        assert self._free, "no slot is free"
        slot = heapq.heappop(self._free)
        self._is_free[slot] = 0
        return slot

    def free(self, slot: int) -> None:
        assert 0 < slot <= self.num_slots and not self._is_free[slot], f"slot {slot} freed twice"
        self._is_free[slot] = 1
        heapq.heappush(self._free, slot)

    def is_free(self, slot: int) -> bool:
        return bool(self._is_free[slot])
