"""GLM-4.5 to 5: <tool_call>f<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>

Strings are written without quotes, so a value's type is the one that the function's schema gives. (4.5 and
4.6 have a line for each part, 4.7 and 5 do not.)
"""

from __future__ import annotations

from typing import Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.json_call import is_name
from sglang.srt.function_call.tagged import read_argument
from sglang.srt.function_call.tools import Tools
from sglang.srt.function_call.values import schema_kinds, to_json
from sglang.srt.utils.text_source import Wait

BEGIN: Final = "<tool_call>"
_END: Final = "</tool_call>"
_KEY_END: Final = "</arg_key>"
_VALUE_END: Final = "</arg_value>"
_HEADER: Final = regex.compile(rf"\s{{0,99}}([^\s<]{{1,256}})\s{{0,99}}(?=<arg_key>|{_END})")
_PART: Final = regex.compile(rf"\s{{0,99}}(<arg_key>|{_END})")
_VALUE: Final = regex.compile(r"\s{0,99}<arg_value>")


def read_glm(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    while (yield from source.stream_until(writer.text, BEGIN)) is not None:
        source.take(len(BEGIN))
        header = yield from source.match(_HEADER)
        if header is None or not is_name(header[1]):
            writer.text(BEGIN + (header[0] if header else ""))
            continue
        writer.start(header[1])
        yield from _read_arguments(source, writer, tools, header[1])


def _read_arguments(source: ToolSource, writer: CallWriter, tools: Tools, function: str) -> Wait[None]:
    """What is cut off stays an open object; what does not belong there ends the call, and is text."""
    begin = "{"
    while True:
        part = yield from source.match(_PART)
        if part is None or part[1] == _END:
            writer.arguments("{}" if begin == "{" else "}")
            return
        key, marker = yield from source.until(_KEY_END)
        if marker is None:
            writer.arguments(begin + to_json(key)[:-1])
            return
        writer.arguments(f"{begin}{to_json(key.strip())}: ")
        begin = ", "
        if (yield from source.match(_VALUE)) is None:
            writer.arguments("null")
            continue
        schema = tools.schema(function, key.strip())
        is_string = schema_kinds(schema) == {"string"}
        if not (yield from read_argument(source, writer, (_VALUE_END,), is_string, schema)):
            return
