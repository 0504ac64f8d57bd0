"""Garbage collection in processes that others wait for at every token."""

from __future__ import annotations

import gc


def leave_start_alone() -> None:
    """What the start has made stays: no collection needs to look at it again.

    A full one over modules, routes and vocabulary of the HTTP process took 67 to 87 ms, in which all streams
    stood still.
    """
    gc.collect()
    gc.freeze()
