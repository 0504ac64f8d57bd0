"""Which part of a model's sizes a rank has. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


class ShardingError(ValueError):
    """A model can't be split over so many ranks; one line for the user."""


@dataclass(frozen=True, slots=True)
class Span:
    """Indices ``begin … end - 1`` of some dimension."""

    begin: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.begin

    def times(self, width: int) -> Span:
        """The same part of a dimension in which each index has ``width`` places."""
        return Span(self.begin * width, self.end * width)


@dataclass(frozen=True, slots=True)
class HeadSpans:
    """Heads of one rank's attention."""

    q: Span
    kv: Span  # shared with other ranks where there are fewer KV heads than ranks


def even_span(total: int, rank: int, size: int, unit: int, what: str) -> Span:
    """Of ``total``, in whole pieces of ``unit``; some ranks may have one piece more than others.

    Raises:
        ShardingError: there are fewer pieces than ranks.
    """
    pieces = -(-total // unit)
    if pieces < size:
        of_units = f" in whole groups of {unit}" if unit > 1 else ""
        raise ShardingError(
            f"{what} {total} can't be split over {size} ranks{of_units}: use a smaller --tp-size"
        )
    return Span(rank * pieces // size * unit, min((rank + 1) * pieces // size * unit, total))


def head_spans(num_heads: int, num_kv_heads: int, rank: int, size: int, where: str) -> HeadSpans:
    """Query heads in equal parts, each with the KV heads that it reads.

    Raises:
        ShardingError: the heads can't be shared out so that every rank's query heads share KV heads alike.
    """
    if num_heads % size:
        raise ShardingError(
            f"{where}: {num_heads} attention heads can't be split over {size} ranks: use a --tp-size that"
            " divides them"
        )
    each = num_heads // size
    q = Span(rank * each, (rank + 1) * each)
    if num_kv_heads % size == 0:
        return HeadSpans(q, Span(rank * num_kv_heads // size, (rank + 1) * num_kv_heads // size))
    if size % num_kv_heads == 0:
        one = rank * num_kv_heads // size
        return HeadSpans(q, Span(one, one + 1))
    raise ShardingError(
        f"{where}: {num_kv_heads} KV heads can be neither split over {size} ranks nor kept by equal numbers"
        " of them: use a --tp-size that divides them, or a multiple of them"
    )


def padded_span(total: int, rank: int, size: int) -> Span:
    """Of ``total``, in parts of equal size but for the last ones, which may be shorter or empty."""
    each = -(-total // size)
    return Span(min(rank * each, total), min((rank + 1) * each, total))
