"""What schemathesis does to a body before it is sent.

Answers stay short: a valid body may ask for 128 of them, each as long as can be. And of three bodies two lose
most of what they need not have: of 30 fields one is nearly always refused, and nothing behind it is reached.
"""

from __future__ import annotations

import random
from typing import Any, Final

import schemathesis

_MOST: Final = {"n": 3, "max_tokens": 8, "max_completion_tokens": 8, "max_new_tokens": 8}
_NEEDED: Final = {"messages", "prompt", "text", "input_ids", "input", "max_tokens", "sampling_params"}


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    if not isinstance(body, dict):
        return body
    dice = random.Random(repr(body))  # the same for the same body, so that a failure can be repeated
    if _NEEDED & body.keys() and dice.random() < 2 / 3:
        body = _thinned(body, dice)
    return _bounded(body)


def _thinned(fields: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    kept = {name: value for name, value in fields.items() if name in _NEEDED or dice.random() < 0.1}
    if isinstance(kept.get("sampling_params"), dict):
        kept["sampling_params"] = _thinned(kept["sampling_params"], dice)
    return kept


def _bounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_bounded(item) for item in value[:4]]
    if not isinstance(value, dict):
        return value
    return {name: _limited(name, item) for name, item in value.items()}


def _limited(name: str, value: Any) -> Any:
    most = _MOST.get(name)
    if most is not None and isinstance(value, int | float) and value > most:
        return 1 + int(value) % most
    return _bounded(value) if name == "sampling_params" else value
