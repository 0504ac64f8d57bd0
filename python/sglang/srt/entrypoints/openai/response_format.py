"""What a ``response_format`` asks of a reply, as a sampling parameter."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.managers.text_request import RequestError

ANY_OBJECT = '{"type": "object"}'


def grammar_params(form: Any) -> dict[str, Any]:
    """Of a ``response_format``.

    Raises:
        RequestError: it is none.
    """
    if form is None:
        return {}
    kind = form.get("type") if isinstance(form, dict) else None
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_schema": ANY_OBJECT}
    if kind == "json_schema":
        named = form.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
        if not isinstance(schema, dict | bool):
            raise RequestError(
                'response_format of type json_schema must have json_schema: {"name": ..., "schema": {...}}'
            )
        return {"json_schema": json.dumps(schema)}
    if kind == "structural_tag":
        return {"structural_tag": json.dumps(form)}
    raise RequestError(
        "response_format must be an object whose type is text, json_object, json_schema or structural_tag"
    )
