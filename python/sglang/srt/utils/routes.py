"""Which HTTP process an answer is for, where there are several (``--tokenizer-worker-num``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from sglang.srt.utils.ipc import Sender, endpoint
from sglang.srt.utils.routed_ids import worker_of


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
