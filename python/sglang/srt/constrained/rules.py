"""What a request's next token may be, by what its reply has so far: beside a grammar, or without one.

A rule walks along tokens and back, as a grammar does: it is right at every position of a verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from sglang.srt.constrained.grammar import ANYTHING, Masks, allow
from sglang.srt.sampling.sampling_params import ChoiceRules, ThinkingLimit

_MARGIN = 4  # ids before a mark's own, so that one which begins inside a character is found too


class TokenRule(Protocol):
    @property
    def is_over(self) -> bool:
        """It will never forbid anything again."""
        ...

    def take(self, token: int) -> None: ...

    def undo(self) -> None:
        """The last ``take``."""
        ...

    def settle(self) -> None:
        """Nothing taken so far will be undone."""
        ...

    def restrict(self, mask: Masks) -> None:
        """Take away what may not follow. ``mask``: [words]."""
        ...


class BadWords:
    """The last token of a word may not follow the others."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        assert words and min(map(len, words)) > 1, "a word of one token is a bias"
        self._words = tuple(words)
        self._most = max(map(len, words)) - 1  # tokens of which a word's end depends
        self._tail: list[int] = []

    @property
    def is_over(self) -> bool:
        return False

    def take(self, token: int) -> None:
        self._tail.append(token)

    def undo(self) -> None:
        self._tail.pop()

    def settle(self) -> None:
        del self._tail[: -self._most]

    def restrict(self, mask: Masks) -> None:
        for word in self._words:
            if tuple(self._tail[-len(word) + 1 :]) == word[:-1]:
                _forbid(mask, word[-1])


class ThinkingBudget:
    """When so many tokens are inside the reasoning, its end must follow."""

    def __init__(self, limit: ThinkingLimit, decode: Callable[[list[int]], str]) -> None:
        self._limit = limit
        self._decode = decode
        self._size = max(len(limit.end.text.encode()), len(limit.end_ids)) + _MARGIN
        # Tokens of the reasoning so far, and its last ones; -1: the reply's first token says whether there is
        # one; None: it is over.
        self._state: tuple[int, tuple[int, ...]] | None = (0 if limit.end.begin_id is None else -1, ())
        self._before: list[tuple[int, tuple[int, ...]] | None] = []

    @property
    def is_over(self) -> bool:
        return self._state is None

    def take(self, token: int) -> None:
        self._before.append(self._state)
        if self._state is None:
            return
        count, tail = self._state
        if count < 0:
            self._state = (0, ()) if token == self._limit.end.begin_id else None
            return
        tail = (*tail, token)[-self._size :]
        ended = self._limit.end.text in self._decode(list(tail))
        self._state = None if ended else (count + 1, tail)

    def undo(self) -> None:
        self._state = self._before.pop()

    def settle(self) -> None:
        self._before.clear()

    def restrict(self, mask: Masks) -> None:
        if self._state is not None and self._state[0] >= self._limit.budget:
            forced = self._next_of_end(self._state[1])
            is_allowed = bool(mask.view(np.uint32)[forced // 32] >> np.uint32(forced % 32) & 1)
            mask[:] = 0
            if is_allowed:
                allow(mask, forced)

    def _next_of_end(self, tail: tuple[int, ...]) -> int:
        """The end may have begun."""
        ids = self._limit.end_ids
        begun = next(n for n in range(len(ids) - 1, -1, -1) if n == 0 or tail[-n:] == ids[:n])
        return ids[begun]


class NoGrammar:
    """A matcher that lets everything come."""

    @property
    def is_terminated(self) -> bool:
        return False

    def accept(self, token: int) -> bool:
        return True

    def rollback(self, count: int) -> None:
        """There is nothing to take back."""

    def fill(self, masks: Masks, row: int) -> None:
        masks[row] = ANYTHING


def make_rules(given: ChoiceRules | None, decode: Callable[[list[int]], str]) -> tuple[TokenRule, ...]:
    """In the order in which they have a say: one that would leave nothing has none."""
    rules: list[TokenRule] = []
    if given is not None and given.thinking is not None:
        rules.append(ThinkingBudget(given.thinking, decode))
    long = () if given is None else tuple(word for word in given.bad_words if len(word) > 1)
    return (*rules, BadWords(long)) if long else tuple(rules)


def _forbid(mask: Masks, token: int) -> None:
    mask.view(np.uint32)[token // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token % 32))
