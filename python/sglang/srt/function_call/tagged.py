"""Calls whose arguments are tags, each with a name and a value.

    Qwen3-Coder    <tool_call><function=f><parameter=k>\\nvalue\\n</parameter></function></tool_call>
    DeepSeek-V3.2  <｜DSML｜invoke name="f">
                   <｜DSML｜parameter name="k" string="true">value</｜DSML｜parameter></｜DSML｜invoke>

Strings are written without quotes. Which values are strings the function's schema says, or the tag.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.json_call import is_name
from sglang.srt.function_call.tools import Tools
from sglang.srt.function_call.values import read_value, schema_kinds, to_json, typed_json
from sglang.srt.utils.text_source import Wait

QWEN_BEGIN: Final = "<tool_call>"
_QWEN_FUNCTION: Final = "<function="
_QWEN_OPENING: Final = regex.compile(r"\s{0,99}<function=")
_QWEN_NAME: Final = regex.compile(r"([^>\n]{1,256})>")
_QWEN_PART: Final = regex.compile(
    r"\s{0,99}(?:<parameter=(?<key>[^>\n]{1,256})>(?:\n|(?=[^\n]))|</function>)"
)
_QWEN_ENDS: Final = ("\n</parameter>", "</parameter>")
_QWEN_TAIL: Final = regex.compile(r"\s{0,99}</tool_call>")

DSML_SECTION: Final = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
DSML_BEGIN: Final = "<｜DSML｜invoke"
_DSML_NAME: Final = regex.compile(r'\s{1,9}name="([^"\n]{1,256})"\s{0,9}>')
_DSML_OBJECT: Final = regex.compile(r"\s{0,99}(?=\{)")
_DSML_PART: Final = regex.compile(
    r'\s{0,99}(?:<｜DSML｜parameter\s{1,9}name="(?<key>[^"\n]{0,256})"\s{1,9}string="(?<string>true|false)"\s{0,9}>'
    r"|</｜DSML｜invoke>)"
)
_DSML_ENDS: Final = ("</｜DSML｜parameter>",)
_DSML_TAIL: Final = regex.compile(r"\s{0,99}</｜DSML｜invoke>")


def read_qwen3_coder(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    """A function without its outer mark, which models forget, must be one of the request's."""
    while (mark := (yield from source.stream_until(writer.text, QWEN_BEGIN, _QWEN_FUNCTION))) is not None:
        source.take(len(mark))
        begun = mark
        if mark == QWEN_BEGIN:
            opening = yield from source.match(_QWEN_OPENING)
            if opening is None:
                writer.text(begun)
                continue
            begun += opening[0]
        name = yield from source.match(_QWEN_NAME)
        if name is None or not is_name(name[1]) or (mark != QWEN_BEGIN and name[1] not in tools.names):
            writer.text(begun + (name[0] if name else ""))
            continue
        writer.start(name[1])
        yield from _read_arguments(source, writer, _QWEN_PART, _QWEN_ENDS, tools.schemas(name[1]))
        yield from source.match(_QWEN_TAIL)


def read_dsml(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    """The arguments may be one JSON object as well."""
    while (mark := (yield from source.stream_until(writer.text, DSML_BEGIN, *DSML_SECTION))) is not None:
        source.take(len(mark))
        if mark != DSML_BEGIN:
            continue
        name = yield from source.match(_DSML_NAME)
        if name is None or not is_name(name[1]):
            writer.text(mark + (name[0] if name else ""))
            continue
        writer.start(name[1])
        if (yield from source.match(_DSML_OBJECT)) is not None:
            yield from read_value(source, writer.arguments, (*DSML_SECTION, DSML_BEGIN, "</｜DSML｜invoke>"))
            yield from source.match(_DSML_TAIL)
        else:
            yield from _read_arguments(source, writer, _DSML_PART, _DSML_ENDS, {})


def _read_arguments(
    source: ToolSource,
    writer: CallWriter,
    part_of: regex.Pattern[str],
    ends: tuple[str, ...],
    schemas: Mapping[str, Any],
) -> Wait[None]:
    """What is cut off stays an open object; what does not belong there ends the call, and is text."""
    begin = "{"
    while True:
        part = yield from source.match(part_of)
        key = None if part is None else part["key"]
        if part is None or key is None:
            rest = source.text.strip()
            if part is None and source.ended and rest and part_of.fullmatch(rest, partial=True):
                source.take(len(source.text))
                writer.arguments(begin + to_json(rest)[:-1])  # in the middle of a tag
            else:
                writer.arguments("{}" if begin == "{" else "}")
            return
        writer.arguments(f"{begin}{to_json(key)}: ")
        begin = ", "
        said = part.groupdict().get("string")
        schema = schemas.get(key) if said is None else None
        is_string = schema_kinds(schema) == {"string"} if said is None else said == "true"
        if not (yield from read_argument(source, writer, ends, is_string, schema)):
            return


def read_argument(
    source: ToolSource,
    writer: CallWriter,
    ends: tuple[str, ...],
    is_string: bool,
    schema: Mapping[str, Any] | None,
) -> Wait[bool]:
    """A value without quotes. True once its end has come."""
    if is_string:
        writer.arguments('"')
        marker = yield from source.stream_until(lambda piece: writer.arguments(to_json(piece)[1:-1]), *ends)
        if marker is not None:
            source.take(len(marker))
            writer.arguments('"')
        return marker is not None
    value, end = yield from source.until(*ends)
    writer.arguments(value if end is None else typed_json(value, schema))
    return end is not None
