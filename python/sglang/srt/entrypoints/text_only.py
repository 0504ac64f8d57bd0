"""What is said wherever a client sends something that is not text."""

from __future__ import annotations

from typing import Any, Final

TEXT_ONLY: Final = "this server reads text alone: send no images, audio, video or files"


def refused_part(where: str, kind: Any) -> str:
    """Of a part of a message, of whatever interface; ``kind``: its type."""
    if isinstance(kind, str) and kind.endswith("text"):
        return f"{where} has a part of type {kind!r} whose text is not a string"
    return f"{where} has a part of type {kind!r}: {TEXT_ONLY}"
