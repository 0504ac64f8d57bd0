"""Words that say when they were made: how a client knows how long a token was on its way.

Every token of the fake executor is one word of the vocabulary, a blank and letters, so that text can be cut
into tokens again; and which word it is tells the time. The clock is one for all processes of a machine.
"""

import re
import time
from collections.abc import Callable
from typing import Final

from sglang.srt.utils.text_tokenizer import TextTokenizer

TICK_S: Final = 0.00025
_WORD: Final = re.compile(rb" [A-Za-z]+")


def word_ids(tokenizer: TextTokenizer) -> list[int]:
    """Ids of tokens that are one word each, no two of the same text, ascending."""
    special = tokenizer.special_ids
    return [
        i
        for i in range(tokenizer.vocab_size)
        if i not in special and _WORD.fullmatch(tokenizer.token_bytes(i))
    ]


class Stamper:
    """In the executor: the token of now."""

    def __init__(self, tokenizer: TextTokenizer, clock: Callable[[], float] = time.monotonic) -> None:
        self._ids = word_ids(tokenizer)
        self._clock = clock

    def token(self) -> int:
        return self._ids[int(self._clock() / TICK_S) % len(self._ids)]


class StampReader:
    """In the client: the age of a word, up to a few seconds."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        ids = word_ids(tokenizer)
        self._ticks = {tokenizer.token_bytes(i)[1:]: tick for tick, i in enumerate(ids)}

    @property
    def longest_s(self) -> float:
        """Ages from here on look shorter than they are."""
        return len(self._ticks) * TICK_S

    @property
    def some_word(self) -> bytes:
        return next(iter(self._ticks))

    def age_s(self, word: bytes, now: float) -> float:
        """``word``: without its blank."""
        return (now / TICK_S - self._ticks[word]) % len(self._ticks) * TICK_S
