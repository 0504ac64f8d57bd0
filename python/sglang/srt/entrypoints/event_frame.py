"""Events of a stream that differ in one text: the rest is encoded once."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from sglang.srt.entrypoints.answering import encoded_event

_encode = msgspec.json.Encoder().encode


class EventFrame:
    def __init__(self, make: Callable[[str], dict[str, Any]]) -> None:
        """``make``: the event with a text, which it has in one place."""
        hole = uuid.uuid4().hex  # nothing that a client has sent
        self._head, self._tail = encoded_event(make(hole)).split(_encode(hole))

    def event(self, text: str) -> bytes:
        """As ``encoded_event(make(text))``."""
        return self._head + _encode(text) + self._tail
