"""Llama 3.2 and 4, and others that write Python: [f(a=1, b="x"), g()]

A list of calls is one only when all of it has come and can be read; its functions must be the request's.
"""

from __future__ import annotations

import ast
from typing import Final

import regex

from sglang.srt.function_call.events import CallWriter, ToolSource
from sglang.srt.function_call.tools import Tools
from sglang.srt.function_call.values import parse_literal, parse_python, read_value, to_json
from sglang.srt.utils.text_source import Wait

_MARKS: Final = ("<|python_start|>", "<|python_end|>")
_HEADER: Final = regex.compile(r"(?=\[\s{0,99}([A-Za-z_][\w.]{0,255})\s{0,99}\()")


def read_pythonic(source: ToolSource, writer: CallWriter, tools: Tools) -> Wait[None]:
    while (marker := (yield from source.stream_until(writer.text, "[", *_MARKS))) is not None:
        if marker in _MARKS:
            source.take(len(marker))
            continue
        header = yield from source.match(_HEADER)
        if header is None or header[1] not in tools.names:
            writer.text(source.take(1))
            continue
        taken: list[str] = []
        yield from read_value(source, taken.append, (), python=True)
        text = "".join(taken)
        calls = parse_calls(text, tools)
        if calls is None:
            writer.text(text)
        for name, arguments in calls or []:
            writer.start(name)
            writer.arguments(arguments)


def parse_calls(text: str, tools: Tools) -> list[tuple[str, str]] | None:
    """Name and arguments of each; None where it is no list of calls."""
    try:
        tree = parse_python(text)
        if not isinstance(tree, ast.List):
            return None
        calls = [_parse_call(node) for node in tree.elts]
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    return calls if all(name in tools.names for name, _ in calls) else None


def _parse_call(node: ast.expr) -> tuple[str, str]:
    if not isinstance(node, ast.Call) or node.args or any(part.arg is None for part in node.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {str(part.arg): parse_literal(part.value) for part in node.keywords}
    return ast.unparse(node.func), to_json(arguments)
