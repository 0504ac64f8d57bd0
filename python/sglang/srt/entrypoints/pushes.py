"""Streams that have news wait in one line and are written many in one turn of the loop.

A task that wakes for every token costs a future, a callback and a switch, together as much as writing the
token. So a stream's task only begins it, waits for its socket when that is full, and ends it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Generator
from typing import Any, Final, Protocol

_MOST_A_TURN: Final = 64


class Pushed(Protocol):
    """A stream in the line."""

    def take(self) -> None:
        """Encode what has come."""
        ...

    def write(self) -> None:
        """Send what ``take`` has made."""
        ...


class Pushes:
    """First come, first served; who has news again after that is last. What comes for a stream in the line is
    joined: it is behind.

    A turn encodes for all of its streams before it writes for the first: a reader that sleeps is woken once,
    and not by each write, which costs as much as the write. Between turns the loop sees to everything else.
    """

    def __init__(self) -> None:
        self._line: deque[Pushed] = deque()
        self._is_called = False

    def add(self, stream: Pushed) -> None:
        self._line.append(stream)
        if not self._is_called:
            self._is_called = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        line = self._line
        streams = [line.popleft() for _ in range(min(len(line), _MOST_A_TURN))]
        for stream in streams:
            stream.take()
        for stream in streams:
            stream.write()
        self._is_called = bool(line)
        if line:
            asyncio.get_running_loop().call_soon(self._turn)


class Held:
    """A coroutine that was begun outside a task and waits: whoever awaits this goes on with it."""

    def __init__(self, coroutine: Coroutine[Any, Any, None], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, None]:
        waits_for = self._waits_for
        try:
            while True:
                try:
                    got = yield waits_for
                except BaseException as error:  # cancelled: the coroutine is to hear of it
                    waits_for = self._coroutine.throw(error)
                else:
                    waits_for = self._coroutine.send(got)
        except StopIteration:
            return

    def close(self) -> None:
        self._coroutine.close()


def begin(coroutine: Coroutine[Any, Any, None]) -> Held | None:
    """Run it as far as it goes without waiting; None if that is to its end."""
    try:
        waits_for = coroutine.send(None)
    except StopIteration:
        return None
    return Held(coroutine, waits_for)
