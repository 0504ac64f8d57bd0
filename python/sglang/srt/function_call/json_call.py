"""One call as a JSON object: {"name": "f", "arguments": {...}}, with a marker on both sides or with none."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.values import parse_json, read_value, to_json
from sglang.srt.utils.text_source import Wait

_MORE_KEYS: Final = ("id", "index", "type")  # may be there, and say nothing that is needed
# Bounded, so that a header that does not end is not tried again and again.
_STRING: Final = r'"(?:[^"\\]|\\.){0,256}"'
_BLANKS: Final = r"\s{0,256}"
_SCALAR: Final = rf"(?:{_STRING}|-?[\d.eE+-]+|true|false|null)"
_HEADER: Final = regex.compile(
    r'_\{_"name"_:_(STRING)_,_"(?:arguments|parameters)"_:_(?=\{)'.replace("_", _BLANKS).replace(
        "STRING", _STRING
    ),
    regex.DOTALL,
)
_REST: Final = regex.compile(
    rf"\s{{0,256}}(?:,\s{{0,256}}\"(?:{'|'.join(_MORE_KEYS)})\"\s{{0,256}}:\s{{0,256}}{_SCALAR}\s{{0,256}})*\}}",
    regex.DOTALL,
)
_BLANK: Final = regex.compile(r"\s{0,256}(?=\S)")


def read_json_call(
    source: ToolSource, writer: CallWriter, stops: tuple[str, ...], known: Collection[str] | None = None
) -> Wait[str | None]:
    """Read one at the beginning of ``text``, arguments as they come.

    None once it is written; else the text that was taken and is no call (perhaps empty). ``known``: names
    that a call may have, where nothing but its looks says that it is one.
    """
    header = yield from source.match(_HEADER)
    if header is None:
        return (yield from _read_whole(source, writer, stops, known))
    name = _name(header[1])
    if name is None or (known is not None and name not in known):
        return str(header[0])
    writer.start(name)
    complete = yield from read_value(source, writer.arguments, stops)
    if complete:
        yield from source.match(_REST)
    return None


def _read_whole(
    source: ToolSource, writer: CallWriter, stops: tuple[str, ...], known: Collection[str] | None
) -> Wait[str | None]:
    """Its parts have another order: wait for all of it."""
    blank = yield from source.match(_BLANK)
    taken = [blank[0] if blank else ""]
    if source.text.startswith("{"):
        yield from read_value(source, taken.append, stops)
    text = "".join(taken)
    call = parse_call(text)
    if call is None or (known is not None and call[0] not in known):
        return text
    writer.start(call[0])
    writer.arguments(call[1])
    return None


def parse_call(text: str) -> tuple[str, str] | None:
    """Name and arguments; None where the text is no call."""
    try:
        value: Any = parse_json(text)
        name = value["name"]
        given = [key for key in ("arguments", "parameters") if key in value]
        if len(given) > 1 or not {*value} <= {"name", *given, *_MORE_KEYS}:
            return None  # another kind of object
        arguments = (value[given[0]] if given else None) or {}
        if isinstance(arguments, str):  # written as a string that holds JSON
            arguments = parse_json(arguments)
        written = to_json(arguments)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not is_name(name) or not isinstance(arguments, dict):
        return None
    return name, written


def _name(quoted: str) -> str | None:
    try:
        name = parse_json(quoted)
    except ValueError:
        return None
    return name if is_name(name) else None


def is_name(value: Any) -> bool:
    """Whether a function may have this name: one line, that can be sent."""
    return isinstance(value, str) and value.isprintable() and value.strip() == value != ""
