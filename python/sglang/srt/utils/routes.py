"""Which HTTP process an answer is for, where there are several (``--tokenizer-worker-num``).

The ids that such a process gives to what it asks for begin with its number. The launcher is number 0, its
workers are 1 to n. Where there is only one process, ids are as they are and everything is for it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import zmq

from sglang.srt.utils.ipc import Sender, endpoint

_MARK: Final = ":"


def prefix_of(worker: int) -> str:
    return f"{worker}{_MARK}"


def own_part(message_id: str) -> str:
    """Of an id that begins with ``prefix_of``: what it is without."""
    return message_id.partition(_MARK)[2]


def worker_of(message_id: str) -> int:
    """Of an id that begins with ``prefix_of``."""
    return int(message_id.partition(_MARK)[0])


def tokenizer_endpoint(folder: Path, worker: int) -> str:
    return endpoint(folder, f"tokenizer{worker}" if worker else "tokenizer")


class RoutedSender:
    """To whoever asked."""

    def __init__(
        self,
        folder: Path,
        num_workers: int,
        encode: Callable[[Any], bytes],
        context: zmq.Context[Any] | None = None,
    ) -> None:
        """``num_workers`` 1: there is the launcher alone, and ids have no numbers."""
        count = num_workers + 1 if num_workers > 1 else 1
        self._senders = [Sender(tokenizer_endpoint(folder, i), encode, context) for i in range(count)]

    @property
    def has_workers(self) -> bool:
        return len(self._senders) > 1

    @property
    def launcher(self) -> Sender:
        return self._senders[0]

    def send(self, worker: int, message: Any) -> None:
        self._senders[worker].send(message)

    def answer(self, asked_id: str, message: Any) -> None:
        self._senders[worker_of(asked_id) if self.has_workers else 0].send(message)

    def close(self, linger_s: float = 0.0) -> None:
        for sender in self._senders:
            sender.close(linger_s)
