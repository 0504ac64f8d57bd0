"""Tools as Kimi-K2.5's template wants them: declared in TypeScript.

Moonshot's own code does it before rendering. Code from a checkpoint is never run, so it is done here, to the
same text.

    namespace functions {
    // What the weather is like
    type get_weather = (_: {
      // A town
      city: string,
      // Default: "celsius"
      unit?: "celsius" | "fahrenheit"
    }) => any;
    }
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

_INDENT: Final = "  "
_LIMITS: Final[Mapping[str, tuple[str, ...]]] = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_IN_UNIONS: Final[Mapping[str, str]] = {
    "string": "string", "number": "number", "integer": "number", "boolean": "boolean", "null": "null",
    "object": "{}", "array": "Array<any>",
}  # fmt: skip


class _NotDeclarable(ValueError):
    """A schema that has no place in these declarations."""


class _Names:
    """What the schemas of one function define and refer to."""

    def __init__(self) -> None:
        self.definitions: dict[str, Any] = {}
        self.root_is_named = False

    def resolve(self, reference: Any) -> str:
        if reference == "#":
            self.root_is_named = True
            return "parameters"
        name = str(reference).removeprefix("#/$defs/")
        if name == reference or name not in self.definitions:
            raise _NotDeclarable(f"reference {reference!r}")
        return name.split("/")[-1]


def sorted_deeply(value: Any) -> Any:
    """With the keys of every object in their order, which is how these models have seen tools."""
    if isinstance(value, dict):
        return {key: sorted_deeply(value[key]) for key in sorted(value)}
    return [sorted_deeply(item) for item in value] if isinstance(value, list) else value


def typescript_tools(tools: Sequence[Mapping[str, Any]]) -> str | None:
    """None where they can't be declared so; the template writes them as JSON then."""
    functions = [
        tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")
    ]
    try:
        declared = [_function(function) for function in functions]
    except (_NotDeclarable, AttributeError, KeyError, TypeError):
        return None
    body = "\n".join(declared)
    return f"# Tools\n\n## functions\nnamespace functions {{\n{body}\n}}\n" if declared else None


def _function(function: Mapping[str, Any]) -> str:
    names, parameters = _Names(), function.get("parameters") or {}
    shape = _object(parameters, "", names)
    parts = []
    if names.root_is_named:
        members = ",\n".join(_members(parameters, _INDENT, names, required_first=False))
        parts.append("interface parameters {" + (f"\n{members}\n" if members else "") + "}")
        shape = "parameters"
    for name, schema in list(names.definitions.items()):
        text = _comment(schema.get("description"), "")
        parts.append(f"{text}interface {name} {_type(schema, '', names)}")
    parts.append(_comment(function.get("description"), "").removesuffix("\n"))
    parts.append(f"type {function['name']} = (_: {shape}) => any;")
    return "\n".join(filter(None, parts))


def _type(schema: Any, indent: str, names: _Names) -> str:
    if isinstance(schema, bool) or schema == {}:
        return "null" if schema is False else "any"
    if "$ref" in schema:
        return names.resolve(schema["$ref"])
    if "anyOf" in schema:
        return " | ".join(_type(option, indent, names) for option in schema["anyOf"])
    if "enum" in schema:
        return " | ".join(f'"{v}"' if isinstance(v, str) else json.dumps(v) for v in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return " | ".join(_IN_UNIONS[option] for option in kind)
    if kind == "object":
        return _object(schema, indent, names)
    if kind == "array":
        return _array(schema, indent, names)
    if kind is None:
        raise _NotDeclarable("a schema without a type")
    return "number" if kind == "integer" else str(kind)


def _object(schema: Mapping[str, Any], indent: str, names: _Names) -> str:
    names.definitions.update(schema.get("$defs", {}))
    inner = indent + _INDENT
    rest = schema.get("additionalProperties")
    # In this order: what refers to the root, or defines a name, may stand in either.
    others = [] if rest is None else [f"{inner}[k: string]: {_rest(rest, inner, names)}"]
    members = [*_members(schema, inner, names, required_first=True), *others]
    return "{\n" + ",\n".join(members) + f"\n{indent}}}" if members else "{}"


def _rest(schema: Any, indent: str, names: _Names) -> str:
    return "never" if schema is False else _type(schema, indent, names)


def _members(schema: Mapping[str, Any], indent: str, names: _Names, required_first: bool) -> list[str]:
    required = set(schema.get("required", []))
    properties = list(schema.get("properties", {}).items())
    if required_first:
        properties.sort(key=lambda item: (item[0] not in required, item[0]))
    members = []
    for name, own in properties:
        text = _docs(own, indent)
        default = own.get("default") if isinstance(own, dict) else None
        if default is not None:
            text += f"{indent}// Default: {json.dumps(default, ensure_ascii=False)}\n"
        mark = "" if name in required else "?"
        members.append(f"{text}{indent}{name}{mark}: {_type(own, indent, names)}")
    return members


def _array(schema: Mapping[str, Any], indent: str, names: _Names) -> str:
    items = schema.get("items") or True
    inner = indent + _INDENT
    docs = _docs(items, inner)
    if docs:
        return f"Array<\n{docs}{inner}{_type(items, inner, names)}\n{indent}>"
    return f"Array<{_type(items, indent, names)}>"


def _docs(schema: Any, indent: str) -> str:
    if not isinstance(schema, dict):
        return ""
    plain = not {"$ref", "anyOf", "enum"} & set(schema) and isinstance(schema.get("type"), str)
    limits = _LIMITS.get(schema["type"], ()) if plain else ()
    said = ", ".join(f"{name}: {schema[name]}" for name in limits if name in schema)
    return _comment(schema.get("description"), indent) + (f"{indent}// {said}\n" if said else "")


def _comment(text: str | None, indent: str) -> str:
    if not text:
        return ""
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in text.split("\n"))
