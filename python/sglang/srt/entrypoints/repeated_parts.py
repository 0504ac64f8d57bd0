"""Parts of an answer that every event repeats with a bit more: encoded once, and copied."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class RepeatedParts:
    """Text and ids of one sample, as JSON, however long they have become."""

    __slots__ = ("_ids", "_text")

    def __init__(self) -> None:
        self._text = bytearray(b'"')
        self._ids = bytearray(b"[")

    def add(self, text: str, ids: Sequence[int]) -> None:
        self._text += msgspec.json.encode(text)[1:-1]
        if ids:
            if len(self._ids) > 1:
                self._ids += b","
            self._ids += msgspec.json.encode(ids)[1:-1]

    @property
    def text(self) -> msgspec.Raw:
        return msgspec.Raw(self._text + b'"')

    @property
    def ids(self) -> msgspec.Raw:
        return msgspec.Raw(self._ids + b"]")
