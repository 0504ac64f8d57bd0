"""One writer's messages to several readers on one host, through shared memory.

A file that all map holds a ring of fixed slots; a message takes as many as it needs. What is there is
written once, however many readers there are. A named pipe for each reader, its *bell*, carries one byte a
slot: a reader without work sleeps in the system, and the system orders what is written before and read after.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

SLOT_BYTES: Final = 1 << 16
NUM_SLOTS: Final = 64
SPIN_S: Final = 20e-6
"""How long a reader looks for a byte before it sleeps: about what being woken takes."""

_HEADER = struct.Struct("<IB")  # bytes of the slot's part, whether more parts follow
_COUNTER = struct.Struct("<Q")  # slots that a reader has read
_COUNTER_STRIDE: Final = 64  # a cache line each
_PART_BYTES: Final = SLOT_BYTES - _HEADER.size
_FULL_WAIT_S: Final = 100e-6


class RingClosedError(RuntimeError):
    """The writer is gone."""


def _size(num_readers: int) -> int:
    return num_readers * _COUNTER_STRIDE + NUM_SLOTS * SLOT_BYTES


def _map(path: Path, num_readers: int) -> mmap.mmap:
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), _size(num_readers))


def create_ring(folder: Path, name: str, num_readers: int) -> list[int]:
    """Files of a ring. The bells, open at both ends: keep them for as long as writer and readers may come
    and go, so that neither finds the other end closed; close them at the end."""
    with open(folder / name, "wb") as file:
        file.truncate(_size(num_readers))
    bells = [folder / f"{name}.{reader}" for reader in range(num_readers)]
    for bell in bells:
        os.mkfifo(bell, 0o600)
    return [os.open(bell, os.O_RDWR | os.O_NONBLOCK) for bell in bells]


class RingWriter:
    """Only one thread at a time may send."""

    def __init__(self, folder: Path, name: str, num_readers: int) -> None:
        self._memory = _map(folder / name, num_readers)
        self._slots_at = num_readers * _COUNTER_STRIDE
        self._num_readers = num_readers
        self._written = 0
        self._bells = [
            os.open(folder / f"{name}.{reader}", os.O_WRONLY | os.O_NONBLOCK) for reader in range(num_readers)
        ]

    def send(self, message: bytes, alive: Callable[[], bool] = lambda: True) -> None:
        """Waits only where readers have left no slot free; gives up if they are not ``alive`` by then."""
        for begin in range(0, max(len(message), 1), _PART_BYTES):
            part = message[begin : begin + _PART_BYTES]
            while self._written - self._least_read() >= NUM_SLOTS:
                if not alive():
                    return
                time.sleep(_FULL_WAIT_S)
            at = self._slots_at + self._written % NUM_SLOTS * SLOT_BYTES
            _HEADER.pack_into(self._memory, at, len(part), begin + _PART_BYTES < len(message))
            self._memory[at + _HEADER.size : at + _HEADER.size + len(part)] = part
            self._written += 1
            for bell in self._bells:
                os.write(bell, b"\1")

    def close(self) -> None:
        for bell in self._bells:
            os.close(bell)
        self._memory.close()

    def _least_read(self) -> int:
        places = range(0, self._slots_at, _COUNTER_STRIDE)
        return min(int(_COUNTER.unpack_from(self._memory, at)[0]) for at in places)


class RingReader:
    """Only one thread at a time may receive."""

    def __init__(self, folder: Path, name: str, num_readers: int, reader: int = 0) -> None:
        self._memory = _map(folder / name, num_readers)
        self._slots_at = num_readers * _COUNTER_STRIDE
        self._counter_at = reader * _COUNTER_STRIDE
        self._read = 0
        self._parts: list[bytes] = []  # of a message that has begun
        self.bell = os.open(folder / f"{name}.{reader}", os.O_RDONLY | os.O_NONBLOCK)
        """Readable when ``receive`` need not wait."""

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None after ``timeout_s`` without one.

        Raises:
            RingClosedError: no writer is left.
        """
        while True:
            if not self._heard(timeout_s):
                return None
            at = self._slots_at + self._read % NUM_SLOTS * SLOT_BYTES
            size, more = _HEADER.unpack_from(self._memory, at)
            self._parts.append(self._memory[at + _HEADER.size : at + _HEADER.size + size])
            self._read += 1
            _COUNTER.pack_into(self._memory, self._counter_at, self._read)
            if not more:
                message, self._parts = b"".join(self._parts), []
                return message

    def close(self) -> None:
        os.close(self.bell)
        self._memory.close()

    def _heard(self, timeout_s: float | None) -> bool:
        spin_until = time.perf_counter() + SPIN_S
        while True:
            try:
                if not os.read(self.bell, 1):
                    raise RingClosedError("the other end of a pipe is closed")
                return True
            except BlockingIOError:
                if time.perf_counter() < spin_until:
                    continue
            ready = select.poll()
            ready.register(self.bell, select.POLLIN)
            if not ready.poll(None if timeout_s is None else timeout_s * 1000):
                return False
