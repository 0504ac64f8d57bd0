"""Patterns that end a reply, over the end of its text.

A pattern sees at most the last ``MOST_IDS`` tokens, so that the cost of a token does not grow with the reply.
What it sees depends on the token it is tried at alone, never on how many tokens a step had.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import regex

T = TypeVar("T")

MOST_IDS: Final = 1024
MOST_CHARACTERS: Final = 4096  # of a pattern
TIME_LIMIT_S: Final = 0.2
"""Of all searches at one token: the loop waits for them, and one may take for ever on the wrong text."""

_MARGIN: Final = 4  # ids: a window may begin inside a character, and \b looks at one before it
_INCOMPLETE: Final = "\ufffd"  # stands for the bytes of a character that is not complete yet


class StopRegexError(ValueError):
    """A pattern that can't be used; the message is for the user who sent it."""


class StopRegexTooSlow(Exception):
    """A search has not ended in time."""


class Patience:
    """How long a request's searches at one token may still take, however many patterns it has."""

    def __init__(self) -> None:
        self._left_s = TIME_LIMIT_S

    def spend(self, search: Callable[[float], T]) -> T:
        """``search``: is given the seconds that it may take.

        Raises:
            StopRegexTooSlow: it takes longer.
        """
        began = time.perf_counter()
        try:
            if self._left_s > 0:
                return search(self._left_s)
        except TimeoutError:
            pass
        finally:
            self._left_s -= time.perf_counter() - began
        raise StopRegexTooSlow


@dataclass(frozen=True, slots=True)
class StopPattern:
    text: str
    compiled: Any  # regex.Pattern
    num_ids: int  # of the reply's end, in which a match can lie

    @staticmethod
    def of(text: str) -> StopPattern:
        """
        Raises:
            StopRegexError: it is no regular expression, or one that an empty text matches.
        """
        if len(text) > MOST_CHARACTERS:
            raise StopRegexError(f"may have at most {MOST_CHARACTERS} characters, got {len(text)}")
        try:
            re.compile(text)  # SGLang's patterns are Python's
            compiled = regex.compile(text)
            matches_empty = compiled.search("", timeout=TIME_LIMIT_S) is not None
        except TimeoutError:
            raise StopRegexError(f"{text!r} takes too long on an empty text: simplify it") from None
        except (re.error, regex.error, RecursionError, OverflowError) as error:
            raise StopRegexError(f"{text!r} is no regular expression: {error}") from error
        if matches_empty:
            raise StopRegexError(f"{text!r} matches an empty text, so that every reply would end at once")
        return StopPattern(text, compiled, _window(text))

    def is_new(self, decode: Callable[[list[int]], str], outputs: Sequence[int], patience: Patience) -> bool:
        """Whether the last of ``outputs`` completes a match: one that was not there without it.

        Raises:
            StopRegexTooSlow: the search takes too long.
        """
        begin = max(0, len(outputs) - self.num_ids)
        seen = list(outputs[begin:])
        # A text that goes on to the left has no beginning, where ^ would match.
        first = 1 if begin else 0
        after = decode(seen).rstrip(_INCOMPLETE)
        found = patience.spend(lambda limit_s: self.compiled.search(after, first, timeout=limit_s))
        if found is None:
            return False
        before = decode(seen[:-1]).rstrip(_INCOMPLETE) if len(seen) > 1 else ""
        now, then = (self._matches(text, first, patience) for text in (after, before))
        return bool(now - then)

    def _matches(self, text: str, first: int, patience: Patience) -> set[tuple[int, int]]:
        def search(limit_s: float) -> set[tuple[int, int]]:
            found = self.compiled.finditer(text, first, overlapped=True, timeout=limit_s)
            return {match.span() for match in found}

        return patience.spend(search)


def _window(text: str) -> int:
    """Ids that a match can take: one has at least a byte, and a character at most four."""
    if any(mark in text for mark in ("*", "+", "?", "{", "\\")):  # repeats, or looks around
        return MOST_IDS
    return min(MOST_IDS, 4 * len(text) + _MARGIN)
