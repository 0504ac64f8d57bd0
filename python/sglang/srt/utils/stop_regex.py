"""Patterns that end a reply, over the end of its text.

A pattern sees at most the last ``MOST_IDS`` tokens, so that the cost of a token does not grow with the reply.
What it sees depends on the token it is tried at alone, never on how many tokens a step had.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import regex

MOST_IDS: Final = 1024
MOST_CHARACTERS: Final = 4096  # of a pattern
TIME_LIMIT_S: Final = 0.2
"""Of one search: the loop waits for it, and a pattern may take for ever on the wrong text."""

_MARGIN: Final = 4  # ids: a window may begin inside a character, and \b looks at one before it
_INCOMPLETE: Final = "\ufffd"  # stands for the bytes of a character that is not complete yet


class StopRegexError(ValueError):
    """A pattern that can't be used; the message is for the user who sent it."""


class StopRegexTooSlow(Exception):
    """A search has not ended in time."""


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

    def is_new(self, decode: Callable[[list[int]], str], outputs: Sequence[int]) -> bool:
        """Whether the last of ``outputs`` completes a match: one that was not there without it.

        Raises:
            StopRegexTooSlow: the search takes too long.
        """
        begin = max(0, len(outputs) - self.num_ids)
        seen = list(outputs[begin:])
        # A text that goes on to the left has no beginning, where ^ would match.
        first = 1 if begin else 0
        after = decode(seen).rstrip(_INCOMPLETE)
        try:
            if self.compiled.search(after, first, timeout=TIME_LIMIT_S) is None:
                return False
            before = decode(seen[:-1]).rstrip(_INCOMPLETE) if len(seen) > 1 else ""
            return bool(self._matches(after, first) - self._matches(before, first))
        except TimeoutError:
            raise StopRegexTooSlow(self.text) from None

    def _matches(self, text: str, first: int) -> set[tuple[int, int]]:
        found = self.compiled.finditer(text, first, overlapped=True, timeout=TIME_LIMIT_S)
        return {match.span() for match in found}


def _window(text: str) -> int:
    """Ids that a match can take: one has at least a byte, and a character at most four."""
    if any(mark in text for mark in ("*", "+", "?", "{", "\\")):  # repeats, or looks around
        return MOST_IDS
    return min(MOST_IDS, 4 * len(text) + _MARGIN)
