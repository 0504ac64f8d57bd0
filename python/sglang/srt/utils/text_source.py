"""Text that comes in pieces, for parsers written as if all of it were there.

A parser is a generator that yields wherever it needs more text. What it decides depends on the text alone and
never on where the pieces end: a marker, or a pattern, that may be about to come is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Final, Generic, TypeVar

import regex

Event = TypeVar("Event")
Value = TypeVar("Value")

_PIECE: Final = 4096  # characters

Wait = Generator[None, None, Value]  # yields while it waits for text, returns a Value


class TextSource(Generic[Event]):
    """``text`` is what has come and has not been taken; ``ended``: nothing follows."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._events: list[Event] = []

    def emit(self, event: Event) -> None:
        self._events.append(event)

    def take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def until(self, *markers: str) -> Wait[tuple[str, str | None]]:
        """Take the text before the first marker, and the marker; all that comes where there is none."""
        longest, searched = max(map(len, markers)), 0
        while True:
            found = first_marker(self.text, markers, searched)
            if found is not None:
                at, marker = found
                before = self.take(at)
                self.take(len(marker))
                return before, marker
            if self.ended:
                return self.take(len(self.text)), None
            searched = max(0, len(self.text) - longest + 1)
            yield

    def stream_until(self, give: Callable[[str], None], *markers: str) -> Wait[str | None]:
        """Give the text before the first marker as it becomes certain. The marker stays in ``text``."""
        while True:
            found = first_marker(self.text, markers)
            if found is not None:
                give(self.take(found[0]))
                return found[1]
            held = 0 if self.ended else beginning_at_end(self.text, markers)
            give(self.take(len(self.text) - held))
            if self.ended:
                return None
            yield

    def stream_rest(self, give: Callable[[str], None]) -> Wait[None]:
        while True:
            give(self.take(len(self.text)))
            if self.ended:
                return
            yield

    def skip_blanks(self) -> Wait[None]:
        while True:
            self.text = self.text.lstrip()
            if self.text or self.ended:
                return
            yield

    def match(self, pattern: regex.Pattern[str]) -> Wait[regex.Match[str] | None]:
        """Take what the pattern matches here; None, and nothing taken, once it can't match."""
        while True:
            match = pattern.match(self.text, partial=not self.ended)
            if match is None:
                return None
            if not match.partial:
                self.take(match.end())
                return match
            yield


class PieceParser(Generic[Event]):
    """Runs a parser over pieces. Joined, the events are the same however a text is cut."""

    def __init__(self, read: Callable[[TextSource[Event]], Iterator[None]]) -> None:
        self._source: TextSource[Event] = TextSource()
        self._run = read(self._source)

    def push(self, text: str) -> list[Event]:
        for begin in range(0, len(text), _PIECE):  # what is taken costs as much as what is left
            self._source.text += text[begin : begin + _PIECE]
            next(self._run, None)
        return self._source.take_events()

    def finish(self) -> list[Event]:
        self._source.ended = True
        next(self._run, None)
        return self._source.take_events()


def first_marker(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    found = [(at, -len(marker), marker) for marker in markers if (at := text.find(marker, start)) >= 0]
    if not found:
        return None
    at, _, marker = min(found)
    return at, marker


def beginning_at_end(text: str, markers: Sequence[str]) -> int:
    """So many characters at the end of ``text`` may begin a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest
