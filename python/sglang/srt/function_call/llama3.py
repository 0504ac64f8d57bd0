"""Llama 3: {"name": "f", "parameters": {...}}, alone or behind <|python_tag|>; several with ; between them.

Where nothing but its looks says that a text is a call, its function must be one of the request's.
"""

from __future__ import annotations

from typing import Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.json_call import read_json_call
from sglang.srt.function_call.tools import Tools
from sglang.srt.utils.text_source import Wait

BEGIN: Final = "<|python_tag|>"
_FIRST: Final = regex.compile(r"\s{0,256}(?=\{)")
_NEXT: Final = regex.compile(r"\s{0,256}[;,]?\s{0,256}(?=\{)")


def read_llama3(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    if (yield from _read_one(source, writer, tools, _FIRST)):
        yield from _read_more(source, writer, tools)
    while (yield from source.stream_until(writer.text, BEGIN)) is not None:
        source.take(len(BEGIN))
        kept = yield from read_json_call(source, writer, (BEGIN,))
        if kept is None:
            yield from _read_more(source, writer, tools)
        else:
            writer.text(BEGIN + kept)


def _read_more(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    while (yield from _read_one(source, writer, tools, _NEXT)):
        pass


def _read_one(source: ToolSource, writer: CallWriter, tools: Tools, before: regex.Pattern[str]) -> Wait[bool]:
    begin = yield from source.match(before)
    if begin is None:
        return False
    kept = yield from read_json_call(source, writer, (BEGIN,), known=tools.names)
    if kept is not None:
        writer.text(begin[0] + kept)
    return kept is None
