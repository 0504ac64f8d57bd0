"""The radix cache: examples, and random operations against a model that keeps a flat dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from sglang.srt.mem_cache.prefix_cache import CacheHandle, NoCache, prefix_keys
from sglang.srt.mem_cache.radix_cache import RadixCache


def keys(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int64)


def put(cache: RadixCache, ids: list[int], pages: list[int]) -> CacheHandle:
    root = cache.lock(cache.match(keys()))
    return cache.insert(keys(*ids), pages, root).handle


def test_keys_are_ids_or_pairs() -> None:
    assert prefix_keys([5, 6, 7], 2, pairs=False).tolist() == [5, 6]
    assert prefix_keys([5, 6, 7], 2, pairs=True).tolist() == [5 << 32 | 6, 6 << 32 | 7]
    assert prefix_keys([5], 0, pairs=True).tolist() == []
    with pytest.raises(AssertionError):
        prefix_keys([5, 6], 2, pairs=True)  # the second pair is not known


def test_a_pair_key_does_not_match_another_next_token() -> None:
    cache = RadixCache(1)
    pairs = prefix_keys([1, 2, 3, 4], 3, pairs=True)
    cache.insert(pairs, [10, 11, 12], cache.lock(cache.match(keys())))
    assert cache.match(prefix_keys([1, 2, 3, 9], 3, pairs=True)).pages == (10, 11)


def test_matching_changes_nothing_and_stops_at_a_page() -> None:
    cache = RadixCache(2)
    cache.unlock(put(cache, [1, 2, 3, 4, 5, 6], [7, 8, 9]))
    for ids, pages in [((1, 2, 3, 9), (7,)), ((1, 2, 3, 4, 5), (7, 8)), ((1,), ()), ((2, 1), ())]:
        assert cache.match(keys(*ids)).pages == pages
    assert len(cache._nodes()) == 2


def test_insert_adopts_only_what_is_new() -> None:
    cache = RadixCache(1)
    cache.unlock(put(cache, [1, 2, 3], [5, 6, 7]))
    match = cache.match(keys(1, 2))
    insertion = cache.insert(keys(1, 2, 3, 4), [5, 6, 17, 18], cache.lock(match))
    assert (insertion.first_adopted, insertion.end_adopted) == (3, 4)
    assert sorted(cache.owned_pages()) == [5, 6, 7, 18]
    assert cache.num_evictable_pages == 0
    cache.check_integrity()


def test_eviction_takes_the_least_recently_used_and_the_end_of_a_leaf() -> None:
    cache = RadixCache(1)
    cache.unlock(put(cache, [1, 2, 3], [1, 2, 3]))
    cache.unlock(put(cache, [1, 2, 8, 9], [91, 92, 4, 5]))
    cache.unlock(cache.lock(cache.match(keys(1, 2, 3))))  # used again
    assert cache.evict(1) == [5]
    assert cache.evict(2) == [4, 3]
    cache.check_integrity()
    assert cache.match(keys(1, 2, 8, 9)).pages == (1, 2)


def test_a_locked_prefix_stays() -> None:
    cache = RadixCache(1)
    cache.unlock(put(cache, [1, 2, 3, 4], [1, 2, 3, 4]))
    handle = cache.lock(cache.match(keys(1, 2)))
    assert cache.num_evictable_pages == 2
    assert sorted(cache.evict(10)) == [3, 4]
    with pytest.raises(AssertionError, match="locked"):
        cache.reset()
    cache.unlock(handle)
    assert cache.reset() == [1, 2] and cache.num_pages == 0
    with pytest.raises(AssertionError, match="more often"):
        cache.unlock(handle)


def test_handles_survive_a_split() -> None:
    cache = RadixCache(1)
    handle = put(cache, [1, 2, 3, 4], [1, 2, 3, 4])
    other = put(cache, [1, 2, 9], [11, 12, 5])
    cache.unlock(other)
    assert cache.evict(10) == [5]
    cache.unlock(handle)
    assert cache.num_evictable_pages == 4
    cache.check_integrity()


def test_many_uses_do_not_grow_the_heap() -> None:
    cache = RadixCache(1)
    cache.unlock(put(cache, [1, 2, 3], [1, 2, 3]))
    for _ in range(5000):
        cache.unlock(cache.lock(cache.match(keys(1, 2, 3))))
    assert len(cache._heap) <= 2 * len(cache._nodes()) + 64
    assert cache.evict(3) == [3, 2, 1]


def test_no_cache_takes_and_gives_nothing() -> None:
    cache = NoCache()
    handle = cache.lock(cache.match(keys(1, 2)))
    insertion = cache.insert(keys(1, 2), [1, 2], handle)
    assert insertion.first_adopted == insertion.end_adopted == 0
    cache.unlock(insertion.handle)
    assert cache.evict(5) == [] and cache.reset() == [] and cache.num_pages == 0


class FlatModel:
    """Each cached page under the whole key prefix that ends with it."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[tuple[int, ...], int] = {}
        self.last_use: dict[tuple[int, ...], int] = {}
        self.locks: dict[tuple[int, ...], int] = {}
        self.uses = 0

    def prefixes(self, ids: list[int]) -> list[tuple[int, ...]]:
        size = self.page_size
        return [tuple(ids[: end * size]) for end in range(1, len(ids) // size + 1)]

    def match(self, ids: list[int]) -> tuple[int, ...]:
        found = []
        for prefix in self.prefixes(ids):
            if prefix not in self.pages:
                break
            found.append(self.pages[prefix])
        return tuple(found)

    def lock(self, ids: list[int], num_pages: int, change: int) -> None:
        self.uses += 1
        for prefix in self.prefixes(ids)[:num_pages]:
            self.locks[prefix] = self.locks.get(prefix, 0) + change
            if change > 0:
                self.last_use[prefix] = self.uses

    def insert(self, ids: list[int], pages: list[int]) -> int:
        known = len(self.match(ids))
        for prefix, page in list(zip(self.prefixes(ids), pages, strict=True))[known:]:
            self.pages[prefix] = page
        return known

    def evictable(self) -> int:
        return sum(self.locks.get(prefix, 0) == 0 for prefix in self.pages)

    def drop(self, page: int) -> None:
        """Checks that the page was the end of an unlocked branch, and one least recently used."""
        (prefix,) = [prefix for prefix, owned in self.pages.items() if owned == page]
        ends = [p for p in self.pages if not self.locks.get(p, 0) and not self._has_more(p)]
        assert prefix in ends
        assert self.last_use[prefix] == min(self.last_use[end] for end in ends)
        del self.pages[prefix]

    def _has_more(self, prefix: tuple[int, ...]) -> bool:
        longer = len(prefix) + self.page_size
        return any(len(other) == longer and other[: len(prefix)] == prefix for other in self.pages)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_random_operations_against_the_model(page_size: int, seed: int) -> None:
    """The model knows no salts: where they differ, so do its ids."""
    rng = random.Random(seed)
    salts = (b"", b"a", bytes(8 * page_size)) if seed % 2 else (b"",)
    cache, model = RadixCache(page_size), FlatModel(page_size)
    held: list[tuple[CacheHandle, list[int], int]] = []
    next_page = 1
    for _ in range(300):
        salt = rng.randrange(len(salts))
        ids = [10 * salt + rng.randrange(3) for _ in range(rng.randrange(1, 10) * rng.choice([1, page_size]))]
        action = rng.random()
        match = cache.match(np.array(ids, dtype=np.int64) % 10, salts[salt])
        assert match.pages == model.match(ids)
        if action < 0.5:
            handle = cache.lock(match)
            model.lock(ids, len(match.pages), 1)
            held.append((handle, ids, len(match.pages)))
        elif action < 0.7 and held:
            handle, ids, num_pages = held.pop(rng.randrange(len(held)))
            salt = ids[0] // 10
            ids = ids[: num_pages * page_size] + [10 * salt + rng.randrange(3) for _ in range(2 * page_size)]
            count = len(ids) // page_size
            pages = list(range(next_page, next_page + count))
            next_page += count
            keys_ = np.array(ids[: count * page_size], dtype=np.int64) % 10
            insertion = cache.insert(keys_, pages, handle, salts[salt])
            assert insertion.first_adopted == model.insert(ids[: count * page_size], pages)
            model.lock(ids, count, 1)
            model.lock(ids, num_pages, -1)
            held.append((insertion.handle, ids, count))
        elif action < 0.9 and held:
            handle, ids, num_pages = held.pop(rng.randrange(len(held)))
            cache.unlock(handle)
            model.lock(ids, num_pages, -1)
        else:
            for page in cache.evict(rng.randrange(1, 6)):
                model.drop(page)
        cache.check_integrity()
        assert cache.num_evictable_pages == model.evictable()
        assert sorted(cache.owned_pages()) == sorted(model.pages.values())
