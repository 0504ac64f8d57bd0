"""Which way a sum over the ranks is made, by its size. Arithmetic only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import inf


@dataclass(frozen=True, slots=True)
class Limits:
    """Ways in an order of which each but the last makes what is too large for those before it."""

    ways: tuple[str, ...]
    up_to: tuple[int, ...]  # bytes of a message, of all ways but the last; none is less than the one before

    def way(self, num_bytes: int) -> str:
        for way, limit in zip(self.ways, self.up_to, strict=False):
            if num_bytes <= limit:
                return way
        return self.ways[-1]

    @property
    def used(self) -> tuple[str, ...]:
        begins = (0, *self.up_to[:-1])
        ways = zip(self.ways, begins, self.up_to, strict=False)
        return (*(way for way, begin, end in ways if end > begin), self.ways[-1])

    def text(self, names: Mapping[str, str]) -> str:
        """For the log: ``pushed up to 1024 KiB, else NCCL``."""
        of_way = dict(zip(self.ways, self.up_to, strict=False))
        parts = [f"{names[way]} up to {of_way[way] >> 10} KiB" for way in self.used[:-1]]
        last = names[self.ways[-1]]
        return ", ".join([*parts, f"else {last}"]) if parts else last


def choose_limits(times: dict[int, dict[str, float]], ways: Sequence[str]) -> Limits:
    """Those with which sums of all sizes together lose least to the fastest way of each, in shares of its
    time: one figure that is off then moves no limit far.

    times: by bytes and way, for any unit; the last way has all sizes, others those that they can make.
    """
    sizes = sorted(times)
    fastest = {size: min(of_way.values()) for size, of_way in times.items()}
    loss_of = {way: [times[size].get(way, inf) / fastest[size] for size in sizes] for way in ways}

    def loss(ends: tuple[int, ...]) -> float:
        """ends: how many sizes are made by a way, or by one before it."""
        spans = zip(ways, (0, *ends), (*ends, len(sizes)), strict=True)
        return sum(sum(loss_of[way][begin:end]) for way, begin, end in spans)

    best = min(combinations_with_replacement(range(len(sizes) + 1), len(ways) - 1), key=loss)
    return Limits(tuple(ways), tuple(sizes[end - 1] if end else 0 for end in best))
