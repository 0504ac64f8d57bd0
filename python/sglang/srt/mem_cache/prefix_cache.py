"""What the scheduler wants of a prefix cache, and the twin that caches nothing.

Keys are int64 arrays, one key for each position. Without a drafter the key of position ``t`` is the
id ``x_t``. With one it is the pair ``(x_t, x_{t+1})``, because the drafter's KV at ``t`` depends on
both: a hit must never reuse a draft entry that was made for another next token.

Requests with different salts share nothing.

The cache owns whole pages. A page it owns is complete and is never written again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

PAIR_SHIFT = 32


def prefix_keys(ids: Sequence[int], count: int, pairs: bool) -> np.ndarray:
    """Keys of positions ``0 … count - 1``; ``pairs`` needs ``count + 1`` ids."""
    assert len(ids) >= count + (1 if pairs and count else 0)
    if not pairs or count == 0:
        return np.array(ids[:count], dtype=np.int64)
    wide = np.array(ids[: count + 1], dtype=np.int64)
    return (wide[:-1] << PAIR_SHIFT) | wide[1:]


class CacheHandle:
    """Opaque: a prefix that the cache keeps as long as the handle is locked."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix, in whole pages. Good until the cache is next changed."""

    pages: tuple[int, ...]
    node: CacheHandle
    num_node_pages: int  # how many pages of the last node belong to the match


@dataclass(frozen=True, slots=True)
class Insertion:
    """``pages[first_adopted:end_adopted]`` of the pages offered belong to the cache from now on.

    Before them the cache had its own pages: what the caller owns there it keeps, as duplicates.
    """

    handle: CacheHandle  # locked; it takes the place of the handle that was held
    first_adopted: int
    end_adopted: int


class PrefixCache(Protocol):
    @property
    def num_pages(self) -> int:
        """Pages owned."""
        ...

    @property
    def num_evictable_pages(self) -> int: ...

    def match(self, keys: np.ndarray, salt: bytes = b"") -> PrefixMatch:
        """Changes nothing."""
        ...

    def lock(self, match: PrefixMatch) -> CacheHandle:
        """Keep the matched pages until ``unlock``."""
        ...

    def unlock(self, handle: CacheHandle) -> None: ...

    def lock_again(self, handle: CacheHandle) -> None:
        """One that was unlocked, with nothing inserted or evicted since."""
        ...

    def insert(
        self, keys: np.ndarray, pages: Sequence[int], held: CacheHandle, salt: bytes = b""
    ) -> Insertion:
        """Offer complete pages; ``held`` is unlocked, the new handle is locked instead."""
        ...

    def evict(self, num_pages: int) -> list[int]:
        """Up to ``num_pages`` unlocked pages, least recently used first; the caller's from now on."""
        ...

    def reset(self) -> list[int]:
        """Forget everything; nothing may be locked. Returns the pages."""
        ...

    def check_integrity(self) -> None: ...

    def owned_pages(self) -> list[int]:
        """For checks."""
        ...


class NoCache:
    """--disable-radix-cache: matches nothing, adopts nothing."""

    def __init__(self) -> None:
        self._handle = CacheHandle()

    @property
    def num_pages(self) -> int:
        return 0

    @property
    def num_evictable_pages(self) -> int:
        return 0

    def match(self, keys: np.ndarray, salt: bytes = b"") -> PrefixMatch:
        return PrefixMatch(pages=(), node=self._handle, num_node_pages=0)

    def lock(self, match: PrefixMatch) -> CacheHandle:
        return self._handle

    def unlock(self, handle: CacheHandle) -> None:
        assert handle is self._handle

    def lock_again(self, handle: CacheHandle) -> None:
        assert handle is self._handle

    def insert(
        self, keys: np.ndarray, pages: Sequence[int], held: CacheHandle, salt: bytes = b""
    ) -> Insertion:
        return Insertion(handle=self._handle, first_adopted=0, end_adopted=0)

    def evict(self, num_pages: int) -> list[int]:
        return []

    def reset(self) -> list[int]:
        return []

    def check_integrity(self) -> None:
        return None

    def owned_pages(self) -> list[int]:
        return []
