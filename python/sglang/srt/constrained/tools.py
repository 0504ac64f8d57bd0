"""Calls of tools as JSON, for a ``tool_choice`` that forces one.

The whole reply is then a JSON array of calls, whatever the model's own way to write them is:

    [{"name": "f", "parameters": {…}}, …]

White space between its parts says nothing, and a model may write it without end where a grammar lets it:
there is only what the backend's fixed form has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from sglang.srt.constrained.grammar import FIXED_FORM, GrammarKind, GrammarSpec

_DEFINITIONS: Final = ("$defs", "definitions")


def tools_grammar(
    tools: Sequence[Mapping[str, Any]], tool_choice: str | Mapping[str, Any] | None, parallel: bool = True
) -> GrammarSpec | None:
    """None: the model may answer as it likes.

    tools: as OpenAI's API has them, checked; tool_choice: "required", or {"type": "function", "function":
    {"name": …}} of one of them, checked; anything else forces nothing. ``parallel``: more than one call may
    be made (never of a named tool).
    """
    functions = [tool["function"] for tool in tools]
    is_named = isinstance(tool_choice, Mapping)
    if isinstance(tool_choice, Mapping):
        wanted = tool_choice["function"]["name"]
        functions = [function for function in functions if function["name"] == wanted]
    elif tool_choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = [_call(function, f"tool{number}", definitions) for number, function in enumerate(functions)]
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": calls}, **FIXED_FORM}
    if is_named or not parallel:
        schema["maxItems"] = 1
    if definitions:
        schema["$defs"] = definitions
    return GrammarSpec(GrammarKind.JSON, json.dumps(schema))


def _call(function: Mapping[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """Names of definitions are a tool's own: they get a prefix, and go where references look for them."""
    parameters = dict(function.get("parameters") or {"type": "object", "properties": {}})
    for keyword in _DEFINITIONS:
        for name, definition in (parameters.pop(keyword, None) or {}).items():
            definitions[f"{prefix}.{name}"] = _moved(definition, prefix)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": _moved(parameters, prefix)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _moved(schema: Any, prefix: str) -> Any:
    """The schema with references to a tool's definitions where these have gone."""
    if isinstance(schema, list):
        return [_moved(item, prefix) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = {key: _moved(value, prefix) for key, value in schema.items()}
    reference = schema.get("$ref")
    for keyword in _DEFINITIONS:
        if isinstance(reference, str) and reference.startswith(f"#/{keyword}/"):
            moved["$ref"] = f"#/$defs/{prefix}." + reference.removeprefix(f"#/{keyword}/")
    return moved
