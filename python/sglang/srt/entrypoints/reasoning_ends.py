"""What ends the part of a reply that its grammar has no say in, where a request asks for such a part."""

from __future__ import annotations

from sglang.srt.parser.reasoning import REASONING_FORMATS, ReasoningFormat


def reasoning_mark(parser: str | None) -> str:
    """Of --reasoning-parser; without one, what most models write."""
    return REASONING_FORMATS.get(parser or "", ReasoningFormat()).end
