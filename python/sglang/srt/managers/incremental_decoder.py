"""Text of a growing list of ids, given out as soon as it is certain.

Joined, the pieces are exactly the decoding of all ids: no broken code point, no byte lost or repeated.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from sglang.srt.utils.text_tokenizer import TextTokenizer

_CONTEXT_TOKENS = 6


class PieceDecoder(Protocol):
    def push(self, token_id: int) -> str:
        """The text that became certain with one more id."""
        ...

    def flush(self) -> str:
        """What was still uncertain, now that nothing follows."""
        ...


class ByteLevelDecoder:
    """For tokenizers whose tokens are bytes: exact by construction."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other tokenizer: decodes a new id behind a few older ones, and takes what it adds.

    Ids that stand for single bytes are collected until they are characters. (Where such bytes are no
    valid UTF-8, the number of replacement characters may differ from that of a decoding in one go.)
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._context: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        byte = self._tokenizer.fallback_byte(token_id)
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        ids = [*self._context, token_id]
        self._context = ids[-_CONTEXT_TOKENS:]
        if byte is not None:
            return self._utf8.decode(byte)
        return self.flush() + self._tokenizer.decode(ids, skip_special_tokens=False)[len(before) :]

    def flush(self) -> str:
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text


def piece_decoder(tokenizer: TextTokenizer, skip_special_tokens: bool) -> PieceDecoder:
    kind = ByteLevelDecoder if tokenizer.is_byte_level else WindowDecoder
    return kind(tokenizer, skip_special_tokens)


class IncrementalDecoder:
    """One request's text. Holds back a tail that may turn out to begin one of its stop strings."""

    def __init__(self, pieces: PieceDecoder, stop: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._stop = tuple(stop)
        self._held = ""

    def push(self, ids: Sequence[int]) -> str:
        """The text that became certain with ``ids``."""
        self._append(ids)
        certain = len(self._held) - self._uncertain_tail()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def finish(self, ids: Sequence[int], stop_trim: str | None) -> str:
        """All that is left, with the request's last ids; cut where ``stop_trim`` begins.

        The scheduler ends a request at the first match, so the match ends inside the last id's text.
        """
        before_last = self._append(ids)
        self._held += self._pieces.flush()
        if stop_trim is None:
            return self._held
        at = self._held.find(stop_trim, max(0, before_last - len(stop_trim) + 1))
        return self._held if at < 0 else self._held[:at]

    def _append(self, ids: Sequence[int]) -> int:
        """Add the text of ``ids``; the length of what was held before the last of them."""
        before_last = len(self._held)
        for token_id in ids:
            before_last = len(self._held)
            self._held += self._pieces.push(token_id)
        return before_last

    def _uncertain_tail(self) -> int:
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
