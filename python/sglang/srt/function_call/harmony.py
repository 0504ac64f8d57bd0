"""GPT-OSS: a reply of several messages, each for a channel, and a call where one has a recipient.

<|channel|>analysis<|message|>thought<|end|><|start|>assistant<|channel|>final<|message|>answer<|return|>
<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}<|call|>
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.json_call import is_name
from sglang.srt.function_call.tools import Tools
from sglang.srt.utils.text_source import TextSource, Wait

_ENDS: Final = ("<|end|>", "<|return|>", "<|call|>")
_NEXT: Final = ("<|start|>", "<|channel|>")
_HEADER: Final = regex.compile(
    r"(?:<\|start\|>assistant([^<]{0,256}))?<\|channel\|>\s{0,9}(\w{1,99})([^<]{0,256})(?:<\|constrain\|>[^<]{0,99})?<\|message\|>"
)
_RECIPIENT: Final = regex.compile(r"\bto=(?:functions\.)?(\S+)")


@dataclass(frozen=True, slots=True)
class Header:
    channel: str
    recipient: str | None


def read_header(source: TextSource[Any]) -> Wait[Header | None]:
    header = yield from source.match(_HEADER)
    if header is None:
        return None
    recipient = _RECIPIENT.search(f"{header[1] or ''} {header[3]}")
    name = str(recipient[1]) if recipient else None
    return Header(str(header[2]), name if is_name(name) else None)


def read_body(source: TextSource[Any], give: Callable[[str], None]) -> Wait[None]:
    marker = yield from source.stream_until(give, *_ENDS, *_NEXT)
    if marker in _ENDS:
        source.take(len(marker))


def read_plain(source: TextSource[Any], give: Callable[[str], None]) -> Wait[None]:
    """What has no header: text up to the next mark, or that mark, where it begins none."""
    if source.text.startswith(_NEXT):
        give(source.take(2))
    yield from source.stream_until(give, *_NEXT)


def read_harmony(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    """Calls alone: thoughts are text here, as no one has asked to have them apart."""
    while not source.ended or source.text:
        header = yield from read_header(source)
        if header is None:
            yield from read_plain(source, writer.text)
        elif header.recipient is None:
            yield from read_body(source, writer.text)
        else:
            writer.start(header.recipient)
            yield from read_body(source, writer.arguments)


def call_mark(header: Header) -> str:
    """The header of a call as ``read_harmony`` reads it again."""
    return f"<|channel|>{header.channel} to=functions.{header.recipient}<|message|>"


CALL_END: Final = "<|call|>"
BEGIN: Final = "<|channel|>analysis<|message|>"
END: Final = "<|end|>"
