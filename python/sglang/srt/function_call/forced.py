"""Calls that must be made: a grammar holds the model to [{"name": "f", "parameters": {...}}, ...]"""

from __future__ import annotations

from typing import Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.json_call import read_json_call
from sglang.srt.function_call.tools import Tools
from sglang.srt.utils.text_source import Wait

_BEGIN: Final = regex.compile(r"\s{0,256}\[\s{0,256}(?=\{)")
_BETWEEN: Final = regex.compile(r"\s{0,256},\s{0,256}(?=\{)")
_END: Final = regex.compile(r"\s{0,256}\]")


def read_forced(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    before = yield from source.match(_BEGIN)
    while before is not None:
        kept = yield from read_json_call(source, writer, ())
        if kept is not None:
            writer.text(before[0] + kept)
            break
        before = yield from source.match(_BETWEEN)
        if before is None and (yield from source.match(_END)) is not None:
            yield from source.skip_blanks()
    yield from source.stream_rest(writer.text)
