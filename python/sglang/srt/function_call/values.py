"""Values in a call's text: where they end, and what they mean."""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final

import regex

from sglang.srt.function_call.events import ToolSource
from sglang.srt.utils.text_source import Wait, beginning_at_end, first_marker

_SURROGATE: Final = regex.compile("[\ud800-\udfff]")
_JSON_OUTSIDE: Final = regex.compile(r'["{}\[\]]')
_PYTHON_OUTSIDE: Final = regex.compile(r"""["'{}\[\]()]""")
_INSIDE: Final = {quote: regex.compile(rf"[\\{quote}]") for quote in ("'", '"')}


def read_value(
    source: ToolSource, give: Callable[[str], None], stops: tuple[str, ...], python: bool = False
) -> Wait[bool]:
    """Give a bracketed value as it comes: ``text`` begins with its bracket. True once its last one has come.

    False where the text, or one of ``stops`` outside a string, ends it before (a stop stays in ``text``). A
    marker inside a string is part of the string.
    """
    outside = _PYTHON_OUTSIDE if python else _JSON_OUTSIDE
    depth, quote = 0, ""
    while True:
        match = (_INSIDE[quote] if quote else outside).search(source.text)
        end = len(source.text) if match is None else match.start()
        if not quote and (stop := first_marker(source.text[:end], stops)) is not None:
            give(source.take(stop[0]))
            return False
        if match is None:
            held = 0 if quote or source.ended else beginning_at_end(source.text, stops)
            give(source.take(end - held))
            if source.ended:
                return False
            yield
            continue
        found = match[0]
        if found == "\\" and match.end() == len(source.text) and not source.ended:
            give(source.take(match.start()))
            yield
            continue
        give(source.take(match.end() + (found == "\\")))
        if quote:
            quote = quote if found == "\\" else ""
        elif found in "\"'":
            quote = found
        else:
            depth += 1 if found in "{[(" else -1
            if depth <= 0:
                return True


def parse_json(text: str) -> Any:
    """
    Raises:
        ValueError: it is no JSON (NaN and Infinity are none).
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def to_json(value: Any) -> str:
    """
    Raises:
        ValueError: it holds a number that JSON has not.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return json.dumps(value) if _SURROGATE.search(text) else text  # half a pair can't be sent


def parse_python(text: str) -> ast.expr:
    """
    Raises:
        SyntaxError, ValueError, RecursionError, MemoryError: it is no expression, or one that is too deep.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes that mean nothing: no concern of the server's log
        return ast.parse(text, mode="eval").body


def parse_literal(node: ast.expr) -> Any:
    """A Python literal; JSON's names for constants are understood too.

    Raises:
        ValueError: it is another expression.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return {"true": True, "false": False, "null": None}[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        number = parse_literal(node.operand)
        if isinstance(number, int | float):
            return -number
    if isinstance(node, ast.List | ast.Tuple):
        return [parse_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if key is None else parse_literal(key) for key in node.keys]
        if all(isinstance(key, str) for key in keys):
            return dict(zip(keys, map(parse_literal, node.values), strict=True))
    raise ValueError(f"not a literal: {ast.unparse(node)}")


def typed_json(text: str, schema: Mapping[str, Any] | None) -> str:
    """A value that was written without quotes, as JSON, by what its schema allows."""
    kinds, stripped = schema_kinds(schema), text.strip()
    if "null" in kinds and stripped == "null":
        return "null"
    if kinds and kinds <= {"string", "null"}:
        return to_json(text)
    try:
        parse_json(stripped)
        return stripped
    except (ValueError, RecursionError):
        pass
    try:  # as Python writes them
        return to_json(parse_literal(parse_python(stripped)))
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return to_json(text)


def schema_kinds(schema: Mapping[str, Any] | None) -> set[str]:
    """JSON's names of the types that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping):
        return set()
    kind = schema.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {item for item in kind if isinstance(item, str)}
    kinds: set[str] = set()
    for name in ("anyOf", "oneOf"):
        for option in schema.get(name) or []:
            kinds |= schema_kinds(option)
    values = schema.get("enum") or []
    if values and all(isinstance(value, str) for value in values):
        kinds.add("string")
    return kinds
