"""Ids of what HTTP processes ask for, where there are several (``--tokenizer-worker-num``).

They begin with the process's number. The launcher is number 0, its workers are 1 to n. Where there is one
process alone, ids are as they are and everything is for it.
"""

from __future__ import annotations

from typing import Final

_MARK: Final = ":"


def prefix_of(worker: int) -> str:
    return f"{worker}{_MARK}"


def own_part(message_id: str) -> str:
    """Of an id that begins with ``prefix_of``: what it is without."""
    return message_id.partition(_MARK)[2]


def worker_of(message_id: str) -> int:
    """Of an id that begins with ``prefix_of``."""
    return int(message_id.partition(_MARK)[0])
