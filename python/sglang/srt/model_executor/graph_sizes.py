"""For which steps CUDA graphs exist. Pure functions of plain values, tested by tables."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sglang.srt.model_executor.step_plan import SpecShape

DEFAULT_MAX_ROWS = 256
LEAST_RAGGED_ROWS = 32  # below, verified tokens are nearly free: nothing is gained by leaving some out
RAGGED_SPACING = 1.1  # sizes of ragged graphs have at least so many times the rows of the one before
RAGGED_SHARES = 3  # numbers of verified tokens for each draft length and size
MOST_RAGGED = 119  # graphs: within a gigabyte at 8 MiB each


@dataclass(frozen=True, slots=True)
class GraphKey:
    draft_len: int  # 0: plain
    rows: int
    tokens: int = 0  # that all rows verify together, each as many as it is given; 0: every row all of its own


def default_sizes(max_rows: int) -> tuple[int, ...]:
    """SGLang's ladder, ending at ``max_rows`` itself."""
    ladder = [1, 2, 4, 8, *range(12, 17, 4), *range(24, 257, 8), *range(272, 512, 16)]
    ladder += range(512, max_rows + 1, 32)
    return sizes_up_to(max_rows, ladder)


def sizes_up_to(max_rows: int, ladder: Sequence[int]) -> tuple[int, ...]:
    """What of ``ladder`` is below ``max_rows``, and ``max_rows``: so no batch within it is uncovered."""
    return (*sorted({size for size in ladder if size < max_rows}), max_rows)


def plain_sizes(num_slots: int, max_rows: int | None, given: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes of the plain set, ascending. ``given``: exactly these (up to the limits).

    A batch never has more rows than there are slots, so no size beyond them is worth its memory.
    """
    if given is not None:
        most = num_slots if max_rows is None else min(max_rows, num_slots)
        within = {size for size in given if size <= most}
        # All are larger: padding to the slots' number serves every batch.
        return tuple(sorted(within)) or (most,)
    return default_sizes(min(DEFAULT_MAX_ROWS if max_rows is None else max_rows, num_slots))


def spec_sizes(max_spec_rows: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """Sizes of the speculative set: those that can speculate, and no others."""
    return default_sizes(max_spec_rows) if given is None else sizes_up_to(max_spec_rows, given)


def ragged_keys(sizes: Mapping[int, Sequence[int]]) -> tuple[GraphKey, ...]:
    """Keys whose rows have draft lengths of their own, of sizes that ``sizes`` has, by draft length.

    For each, verified tokens a row in steps of a half from the middle of 1 … draft_len + 1 on: fewer are not
    worth so many draft forwards. Where there are too many graphs the row sizes are thinned out further.
    """
    spacing = RAGGED_SPACING
    while len(keys := _ragged_keys(sizes, spacing)) > MOST_RAGGED:
        spacing *= RAGGED_SPACING
    return keys


def _ragged_keys(sizes: Mapping[int, Sequence[int]], spacing: float) -> tuple[GraphKey, ...]:
    keys = []
    for draft_len, all_rows in sizes.items():
        if draft_len == 0:
            continue
        halves = range(max(3, draft_len + 1), 2 * draft_len + 2)[:RAGGED_SHARES]
        for rows in _spaced(all_rows, spacing):
            keys += [GraphKey(draft_len, rows, half * rows // 2) for half in halves]
    return tuple(keys)


def _spaced(sizes: Sequence[int], spacing: float) -> list[int]:
    """From the largest down, those that lie far enough apart."""
    kept: list[int] = []
    for rows in sorted(sizes, reverse=True):
        if rows >= LEAST_RAGGED_ROWS and (not kept or rows * spacing <= kept[-1]):
            kept.append(rows)
    return kept


def spread(total: int, rows: int) -> list[int]:
    """``total`` tokens over ``rows`` rows, as evenly as it goes."""
    return [total // rows + (row < total % rows) for row in range(rows)]


class GraphSizes:
    """Captured sizes by draft length; which of them serves a step."""

    def __init__(
        self, sizes: Mapping[int, Sequence[int]], pad: bool, ragged: Iterable[GraphKey] = ()
    ) -> None:
        """``sizes``: draft length -> sizes, ascending; ``pad``: a step may run in a larger graph; ``ragged``:
        keys with ``tokens``, each of a size that ``sizes`` has too.
        """
        self.by_draft_len = {draft_len: tuple(of) for draft_len, of in sizes.items()}
        self.ragged = tuple(sorted(ragged, key=lambda key: (key.tokens, key.rows)))
        self._pad = pad

    @property
    def max_rows(self) -> int:
        return max(sizes[-1] for sizes in self.by_draft_len.values())

    def ragged_of(self, draft_len: int) -> tuple[tuple[int, int], ...]:
        """(rows, tokens) of the ragged keys, ascending."""
        return tuple(sorted((key.rows, key.tokens) for key in self.ragged if key.draft_len == draft_len))

    def covering(self, draft_len: int, num_rows: int) -> GraphKey | None:
        """The smallest graph for a step; None: the step has to run eagerly."""
        sizes = self.by_draft_len.get(draft_len, ())
        place = bisect_left(sizes, num_rows)
        if place == len(sizes) or (sizes[place] != num_rows and not self._pad):
            return None
        return GraphKey(draft_len, sizes[place])

    def covering_ragged(self, draft_len: int, num_rows: int, num_tokens: int) -> GraphKey | None:
        """The smallest graph whose padded rows take just the tokens that are left; None: there is none."""
        for key in self.ragged:
            rows, tokens = key.rows - num_rows, key.tokens - num_tokens
            fits = 0 <= rows <= tokens <= rows * (draft_len + 1)
            if key.draft_len == draft_len and fits and (rows == 0 or self._pad):
                return key
        return None

    def capture_order(self, spec: SpecShape | None) -> list[GraphKey]:
        """All keys, those with the most tokens first: what they allocate serves the smaller ones."""

        def tokens(key: GraphKey) -> int:
            return key.tokens or key.rows * (spec.num_nodes(key.draft_len) if spec else 1)

        keys = [GraphKey(draft_len, rows) for draft_len, sizes in self.by_draft_len.items() for rows in sizes]
        return sorted([*keys, *self.ragged], key=lambda key: (-tokens(key), key.draft_len))

    def largest(self) -> list[GraphKey]:
        """The largest key of every set."""
        return [GraphKey(draft_len, sizes[-1]) for draft_len, sizes in self.by_draft_len.items()]
