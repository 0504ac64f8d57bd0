"""Sockets between the processes of one server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

T = TypeVar("T")


def endpoint(folder: Path, name: str) -> str:
    return f"ipc://{folder / name}"


class Sender:
    """One end of a pipe: sends to the process that receives at ``address``. Never blocks, never drops."""

    def __init__(
        self, address: str, encode: Callable[[Any], bytes], context: zmq.Context[Any] | None = None
    ) -> None:
        self._socket: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(zmq.PUSH)
        self._socket.set_hwm(0)
        self._socket.connect(address)
        self._encode = encode

    def send(self, message: Any) -> None:
        self._socket.send(self._encode(message))

    def close(self, linger_s: float = 0.0) -> None:
        """``linger_s``: how long what was sent last may still take to leave."""
        self._socket.close(linger=int(linger_s * 1000))


class Receiver(Generic[T]):
    """The other end: receives what several senders send to ``address``."""

    def __init__(
        self, address: str, decode: Callable[[bytes], T], context: zmq.Context[Any] | None = None
    ) -> None:
        self._socket: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(zmq.PULL)
        self._socket.set_hwm(0)
        self._socket.bind(address)
        self._decode = decode

    @property
    def file_descriptor(self) -> int:
        """Becomes readable when a message *may* have come (edge-triggered: then read all)."""
        return int(self._socket.getsockopt(zmq.FD))

    def wait(self, timeout_s: float | None) -> bool:
        """Whether a message is there, after at most ``timeout_s`` (None: however long it takes)."""
        return bool(self._socket.poll(None if timeout_s is None else int(timeout_s * 1000)))

    def receive_all(self) -> list[T]:
        """Every message that is there now; does not wait."""
        messages: list[T] = []
        while True:
            try:
                message = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            messages.append(self._decode(message))

    def close(self) -> None:
        self._socket.close(linger=0)


def close_sockets() -> None:
    """Close what is still open, and wait for senders that linger. Not the sockets of another context."""
    zmq.Context.instance().destroy(linger=0)
