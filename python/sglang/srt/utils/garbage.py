"""Garbage collection in processes that others wait for at every token."""

from __future__ import annotations

import gc
from typing import Final

_YOUNG: Final = 20_000  # objects: 250 rows of a step make 500 lists for a moment, no reason for a collection
# Collections of the younger until the next older are looked at. What a request leaves is old when it ends:
# with Python's own 10 and 10 two million objects would have to come first, and the process grew.
_OLDER: Final = (3, 2)


def leave_start_alone() -> None:
    """What the start has made stays: no collection needs to look at it again. And there are fewer of them.

    A full one over modules, routes and vocabulary of the HTTP process took 67 to 87 ms, in which all streams
    stood still.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, *_OLDER)
