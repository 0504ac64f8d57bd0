"""Fields of a request beside its sampling parameters: its place in the queue, what it shares, its code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from sglang.srt.managers.text_request import RequestError, TextRequest

SCHEDULING_FIELDS: Final = ("priority", "cache_salt", "extra_key", "custom_logit_processor", "no_logs")
LONGEST_PROCESSOR: Final = 1 << 20
_LONGEST_SALT: Final = 1024
_HEX: Final = re.compile("[0-9a-fA-F]+")
_LARGEST: Final = 2**31 - 1


def cache_salt(salt: str | None, extra_key: str | None) -> str:
    """Both together; no two pairs give the same."""
    given = [part or "" for part in (salt, extra_key)]
    for part in given:
        if len(part) > _LONGEST_SALT:
            raise RequestError(f"cache_salt and extra_key may have at most {_LONGEST_SALT} characters")
        if any("\ud800" <= char <= "\udfff" for char in part):
            raise RequestError("cache_salt and extra_key must be Unicode text, without half a surrogate pair")
    return json.dumps(given) if any(given) else ""


def scheduled(requests: Sequence[TextRequest], body: Mapping[str, Any]) -> list[TextRequest]:
    """With what ``body`` says of them.

    Raises:
        RequestError: a field is not what it must be.
    """
    count = len(requests)
    salts, keys = (_for_each(body, name, str, "a string", count) for name in ("cache_salt", "extra_key"))
    priorities = _for_each(body, "priority", int, "an integer", count)
    processors = _for_each(body, "custom_logit_processor", str, "a string", count)
    no_logs = body.get("no_logs") or False
    if not isinstance(no_logs, bool):
        raise RequestError(f"no_logs must be true or false, got {no_logs!r}")
    return [
        replace(
            request,
            cache_salt=cache_salt(salt, key),
            priority=checked_priority(priority),
            processor=checked_processor(processor),
            no_logs=no_logs,
        )
        for request, salt, key, priority, processor in zip(
            requests, salts, keys, priorities, processors, strict=True
        )
    ]


def checked_priority(value: int | None) -> int | None:
    if value is not None and abs(value) > _LARGEST:
        raise RequestError(f"priority must be from {-_LARGEST} to {_LARGEST}, got {value}")
    return value


def checked_processor(text: str | None) -> str | None:
    """Only its form: whether it is run, and is a processor, the scheduler says."""
    if not text:
        return None
    try:
        given = json.loads(text) if len(text) <= LONGEST_PROCESSOR else None
    except (ValueError, RecursionError):
        given = None
    code = given.get("callable") if isinstance(given, dict) else None
    if not (isinstance(code, str) and _HEX.fullmatch(code)):
        raise RequestError(
            "custom_logit_processor must be what CustomLogitProcessor.to_str() gives:"
            f' {{"callable": hex digits}}, of at most {LONGEST_PROCESSOR} characters'
        )
    return json.dumps({"callable": code})


def _for_each(body: Mapping[str, Any], name: str, kind: type, what: str, count: int) -> list[Any]:
    """One value for all prompts, or one for each."""
    value = body.get(name)
    values = value if isinstance(value, list) else [value] * count
    if len(values) != count or not all(item is None or type(item) is kind for item in values):
        raise RequestError(f"{name} must be {what}, or a list with one for each prompt")
    return values
