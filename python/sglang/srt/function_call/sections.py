"""Kimi-K2 and DeepSeek: a section of calls, each a header and JSON arguments between markers of their own.

    Kimi-K2        <|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{...}<|tool_call_end|>
    DeepSeek-V3    <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\\n```json\\n{...}\\n```<｜tool▁call▁end｜>
    DeepSeek-V3.1  <｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜>

The marks of a section say nothing that the calls do not, and are dropped wherever they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.json_call import is_name
from sglang.srt.function_call.tools import Tools
from sglang.srt.function_call.values import read_value
from sglang.srt.utils.text_source import Wait


@dataclass(frozen=True, slots=True)
class SectionFormat:
    section: tuple[str, ...]
    begin: str
    end: str
    header: regex.Pattern[str]  # its first group names the call; matches up to the arguments, or to ``end``
    tail: regex.Pattern[str]  # what follows the arguments
    ids: bool = False  # whether the header is an id, which the client gets as it is


def _format(
    section: tuple[str, ...], begin: str, end: str, header: str, tail: str, ids: bool = False
) -> SectionFormat:
    up_to = rf"(?=\{{|{regex.escape(end)})"
    return SectionFormat(
        section, begin, end, regex.compile(header + up_to), regex.compile(tail + regex.escape(end)), ids
    )


KIMI_K2: Final = _format(
    (
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
        "<|tool_call_section_begin|>", "<|tool_call_section_end|>",
    ),
    "<|tool_call_begin|>",
    "<|tool_call_end|>",
    r"\s{0,99}([^\s<][^<\n]{0,255}?)\s{0,99}<\|tool_call_argument_begin\|>\s{0,99}",
    r"\s{0,99}",
    ids=True,
)  # fmt: skip
_DEEPSEEK: Final = (
    ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
)
DEEPSEEK_V3: Final = _format(
    *_DEEPSEEK,
    r"\s{0,99}function<｜tool▁sep｜>\s{0,99}([^\s<][^<\n]{0,255}?)\s{0,9}\n\s{0,99}```(?:json)?\s{0,99}",
    r"\s{0,99}(?:```)?\s{0,99}",
)
DEEPSEEK_V31: Final = _format(
    *_DEEPSEEK, r"\s{0,99}([^\s<][^<\n]{0,255}?)\s{0,99}<｜tool▁sep｜>\s{0,99}", r"\s{0,99}"
)
_KIMI_ID: Final = regex.compile(r"(?:functions\.)?(.+?)(?::\d+)?")


def section_reader(form: SectionFormat) -> Callable[[ToolSource, CallWriter, Tools], Wait[None]]:
    def read(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
        while (
            marker := (yield from source.stream_until(writer.text, *form.section, form.begin))
        ) is not None:
            source.take(len(marker))
            if marker == form.begin:
                yield from _read_call(form, source, writer, tools)

    return read


def _read_call(form: SectionFormat, source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    header = yield from source.match(form.header)
    name = None if header is None else _name(form, str(header[1]), tools)
    if header is None or name is None:
        writer.text(form.begin + (header[0] if header else ""))
        return
    writer.start(name, str(header[1]) if form.ids else None)
    if source.text.startswith("{"):
        yield from read_value(source, writer.arguments, (*form.section, form.begin, form.end))
    else:
        writer.arguments("{}")
    yield from source.match(form.tail)


def _name(form: SectionFormat, header: str, tools: Tools) -> str | None:
    if not is_name(header):
        return None
    if not form.ids:
        return header
    if header.isdecimal():  # a bare counter: clear where there is one function
        return next(iter(tools.names)) if len(tools.names) == 1 else None
    match = _KIMI_ID.fullmatch(header)
    return None if match is None else str(match[1])


def all_markers(form: SectionFormat) -> Iterator[str]:
    """Those that begin calls."""
    yield form.begin
    yield from (mark for mark in form.section if "begin" in mark)
