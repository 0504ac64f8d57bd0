"""Where ranks put what they push to each other: one block of memory a rank, the same on all. Arithmetic only.

A block has flags first, then places for data. A program of a sum has places of its own, whatever the size
of the message, and uses them in turns of two. That is what makes the next sum safe: a rank begins its sum
number n + 2 only when every peer has begun number n + 1, so has read all of number n, whose places those
of n + 2 are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PROGRAM_BYTES: Final = 4096
"""Of a message (of a part of it where the sum is made in two steps) that one program moves."""

MAX_ROWS: Final = 256
ROW_BYTES: Final = 16384
"""Of a sum that is normed in the same launch: rows that it may have, a program each, and bytes of one."""

TURNS: Final = 2
MAX_RANKS: Final = 16
_FLAG_BYTES: Final = 4
_ALIGNED: Final = 4096


@dataclass(frozen=True, slots=True)
class PushLayout:
    """Offsets in bytes. ``once``: every rank pushes its whole message to every other one. ``twice``: it
    pushes to each the part that this one adds up, and gets the sums of the other parts back. ``rows``: as
    ``once``, but a program has a whole row, which it can norm."""

    size: int  # ranks
    once_bytes: int  # largest message
    twice_bytes: int

    @property
    def once_programs(self) -> int:
        return _pieces(self.once_bytes, PROGRAM_BYTES)

    @property
    def twice_programs(self) -> int:
        return _pieces(_pieces(self.twice_bytes, self.size), PROGRAM_BYTES)

    @property
    def programs(self) -> int:
        """Of the largest sum; flags are laid out for so many."""
        return max(self.once_programs, self.twice_programs, MAX_ROWS)

    def flags(self, step: int) -> int:
        """Of ``once`` (0), of the two steps of ``twice`` (1, 2), and of ``rows`` (3): [size, programs] int32
        each."""
        return step * self.size * self.programs * _FLAG_BYTES

    @property
    def once_data(self) -> int:
        """[turns, size, once_programs * PROGRAM_BYTES]."""
        return _pieces(self.flags(4), _ALIGNED) * _ALIGNED

    @property
    def twice_parts(self) -> int:
        """What the others give of this rank's part: [turns, size, twice_programs * PROGRAM_BYTES]."""
        return self.once_data + TURNS * self.size * self.once_programs * PROGRAM_BYTES

    @property
    def twice_sums(self) -> int:
        """Sums of the others' parts, as ``twice_parts``."""
        return self.twice_parts + TURNS * self.size * self.twice_programs * PROGRAM_BYTES

    @property
    def row_data(self) -> int:
        """[turns, size, MAX_ROWS * ROW_BYTES]."""
        return self.twice_sums + TURNS * self.size * self.twice_programs * PROGRAM_BYTES

    @property
    def total_bytes(self) -> int:
        return self.row_data + TURNS * self.size * MAX_ROWS * ROW_BYTES


def _pieces(total: int, each: int) -> int:
    return -(-total // each)
