"""Patterns that end a reply, over the end of its text.

A pattern sees at most the last ``MOST_IDS`` tokens, so that the cost of a token does not grow with the reply.
What it sees depends on the token it is tried at alone, never on how many tokens a step had.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import regex

T = TypeVar("T")

MOST_IDS: Final = 1024
MOST_CHARACTERS: Final = 4096  # of a pattern
TIME_LIMIT_S: Final = 0.2
"""Of all searches at one token: the loop waits for them, and one may take for ever on the wrong text."""
TIME_A_TOKEN_S: Final = 0.001
"""Of all searches at a token on the average: what they take beyond it is missing at later ones. Every running
request may take so much of every step; an ordinary search takes 0.03 ms."""

# So many ids, of at least a byte each, hold a character; and so many stand before those that are decoded,
# where a character may begin or a blank be dropped.
_CONTEXT: Final = 4
# Ids that may each end inside a character, one after the other; of more the bytes are taken for none.
_MOST_OPEN: Final = 16
_INCOMPLETE: Final = "\ufffd"  # stands for the bytes of a character that is not complete yet
_LOOKS_AROUND: Final = re.compile(r"\\[bBZAmMGK]|\$|\(\?(?!:)")


class StopRegexError(ValueError):
    """A pattern that can't be used; the message is for the user who sent it."""


class StopRegexTooSlow(Exception):
    """A search has not ended in time."""


class Patience:
    """How long a request's searches may still take, however many patterns it has."""

    def __init__(self) -> None:
        self._left_s = TIME_LIMIT_S

    def next_token(self) -> None:
        self._left_s = min(TIME_LIMIT_S, self._left_s + TIME_A_TOKEN_S)

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
    # Whether where it can't begin to match, it never will, whatever follows: the library finds beginnings of
    # matches, but for patterns that look at what is behind a place, or disregard case.
    tells_beginnings: bool

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
        return StopPattern(text, compiled, _LOOKS_AROUND.search(text) is None)

    def matches(self, text: str, first: int, patience: Patience) -> set[tuple[int, int]]:
        def search(limit_s: float) -> set[tuple[int, int]]:
            found = self.compiled.finditer(text, first, overlapped=True, timeout=limit_s)
            return {match.span() for match in found}

        return patience.spend(search)


class ReplyTail:
    """The text of a reply's last ``MOST_IDS`` ids, but for an incomplete character at its end. It grows by
    ids, of which the last ones alone are decoded."""

    def __init__(self) -> None:
        self.num_ids = 0  # of the whole reply
        self.text = ""
        self.text_before = ""  # without what the last id brought
        self._settled = ""  # the part of ``text`` that is not made of ``_open``
        self._context: list[int] = []
        self._context_size = 0  # in characters
        self._open: list[int] = []
        self._sizes: deque[int] = deque()  # characters that each id has brought

    @property
    def has_left(self) -> bool:
        """Whether the text goes on to the left, so that its beginning is none."""
        return self.num_ids > MOST_IDS

    def push(self, token: int, decode: Callable[[list[int]], str]) -> int:
        """How many characters it has lost on the left."""
        self._open.append(token)
        if len(self._open) > _MOST_OPEN:
            self._settle(len(self._open) - _CONTEXT + 1, decode)
        self.text_before = self.text
        whole = self._opened(len(self._open), decode)
        shown = whole.rstrip(_INCOMPLETE)
        self.text = self._settled + shown
        self._sizes.append(max(0, len(self.text) - len(self.text_before)))
        if shown == whole:
            self._settle(len(self._open), decode)
        self.num_ids += 1
        return self._slide()

    def _opened(self, count: int, decode: Callable[[list[int]], str]) -> str:
        """The text of the first ``count`` open ids."""
        return decode([*self._context, *self._open[:count]])[self._context_size :]

    def _settle(self, count: int, decode: Callable[[list[int]], str]) -> None:
        self._settled += self._opened(count, decode)
        self._context = [*self._context, *self._open[:count]][-_CONTEXT:]
        self._context_size = len(decode(self._context))
        del self._open[:count]

    def _slide(self) -> int:
        if len(self._sizes) <= MOST_IDS:
            return 0
        lost = self._sizes.popleft()
        self.text, self.text_before = self.text[lost:], self.text_before[lost:]
        self._settled = self._settled[lost:]
        return lost


class StopSearch:
    """A request's patterns over its reply."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._patterns = [StopPattern.of(text) for text in texts]
        self._begins = [0] * len(self._patterns)  # of each: no match that is to come begins before
        self._tail = ReplyTail()
        self._patience = Patience()

    @property
    def num_ids(self) -> int:
        return self._tail.num_ids

    def push(self, token: int, decode: Callable[[list[int]], str]) -> None:
        """The reply's next id."""
        lost = self._tail.push(token, decode)
        self._begins = [max(0, begin - lost) for begin in self._begins]
        self._patience.next_token()

    def completed(self) -> str | None:
        """The pattern that the last id completes a match of: one that was not there without it.

        Raises:
            StopRegexTooSlow: searching takes too long.
        """
        first = 1 if self._tail.has_left else 0
        for index, pattern in enumerate(self._patterns):
            begin = max(first, self._begins[index])
            if self._search(pattern, begin) is None:
                if pattern.tells_beginnings:
                    partial = self._search(pattern, begin, partial=True)
                    self._begins[index] = len(self._tail.text) if partial is None else partial
                continue
            now, then = (
                pattern.matches(text, first, self._patience)
                for text in (self._tail.text, self._tail.text_before)
            )
            if now - then:
                return pattern.text
        return None

    def _search(self, pattern: StopPattern, begin: int, partial: bool = False) -> int | None:
        """Where the first match begins, or what may become one."""
        found = self._patience.spend(
            lambda limit_s: pattern.compiled.search(self._tail.text, begin, partial=partial, timeout=limit_s)
        )
        return None if found is None else int(found.start())
