"""Qwen 2.5 and 3, Hermes: <tool_call>{"name": "f", "arguments": {...}}</tool_call>"""

from __future__ import annotations

from typing import Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.json_call import read_json_call
from sglang.srt.function_call.tools import Tools
from sglang.srt.utils.text_source import Wait

BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_TAIL: Final = regex.compile(rf"[\s}}]{{0,256}}{regex.escape(_END)}")


def read_hermes(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    while (yield from source.stream_until(writer.text, BEGIN)) is not None:
        source.take(len(BEGIN))
        kept = yield from read_json_call(source, writer, (BEGIN, _END))
        if kept is None:
            yield from source.match(_TAIL)
        else:
            writer.text(BEGIN + kept)
