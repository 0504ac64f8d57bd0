"""Both forms of a structural tag: that of triggers and structures, and the general one.

{"type": "structural_tag", "triggers": ["<f="],
 "structures": [{"begin": "<f=a>", "schema": {…}, "end": "</f>"}]}
{"type": "structural_tag", "format": {"type": "triggered_tags", …}}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sglang.srt.constrained.grammar import GrammarError


@dataclass(frozen=True, slots=True)
class Tag:
    trigger: str
    begin: str
    schema: Any  # of the JSON between begin and end
    end: str


def read_tags(text: str) -> dict[str, Any]:
    """The general form.

    Raises:
        GrammarError: neither form.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise GrammarError(f"structural_tag is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise GrammarError("structural_tag must be an object with structures and triggers, or with a format")
    if isinstance(value.get("format"), dict):
        return {"type": "structural_tag", "format": value["format"]}
    structures, triggers = value.get("structures"), value.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list):
        raise GrammarError("structural_tag must have structures and triggers (lists), or a format")
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": triggers, "tags": [_tag(s) for s in structures]},
    }


def _tag(structure: Any) -> dict[str, Any]:
    if not isinstance(structure, dict) or not isinstance(structure.get("begin"), str):
        raise GrammarError("each of a structural_tag's structures must have begin (text), schema and end")
    schema = structure.get("schema")
    return {
        "type": "tag",
        "begin": structure["begin"],
        "content": {"type": "json_schema", "json_schema": {} if schema is None else schema},
        "end": structure.get("end", ""),
    }


def simple_tags(general: dict[str, Any]) -> list[Tag]:
    """The general form as tags around JSON in running text.

    Raises:
        GrammarError: it is more than that.
    """
    form = general["format"]
    triggers, tags = form.get("triggers"), form.get("tags")
    others = any(form.get(name) for name in ("at_least_one", "stop_after_first", "excludes"))
    if form.get("type") != "triggered_tags" or not triggers or not isinstance(tags, list) or others:
        raise GrammarError(
            "--grammar-backend llguidance knows structural tags of structures and triggers alone; for others"
            " start the server with --grammar-backend xgrammar"
        )
    return [_simple(tag, triggers) for tag in tags]


def _simple(tag: Any, triggers: list[Any]) -> Tag:
    content = tag.get("content") if isinstance(tag, dict) else None
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        raise GrammarError(
            "--grammar-backend llguidance knows structural tags around JSON alone; for others start the"
            " server with --grammar-backend xgrammar"
        )
    begin, end = tag.get("begin"), tag.get("end", "")
    if not isinstance(begin, str) or not isinstance(end, str):
        raise GrammarError("begin and end of a structural tag must be texts")
    trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
    if trigger is None:
        raise GrammarError(f"no trigger is a beginning of the structural tag {begin!r}")
    return Tag(trigger, begin, content.get("json_schema"), end)
