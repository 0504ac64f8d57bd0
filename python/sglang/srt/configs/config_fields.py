"""Typed reading of a model's JSON files; everything wrong with them becomes one clear line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class ModelConfigError(ValueError):
    """A model folder can't be used; the message is one line for the user and says where."""


def read_json_object(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelConfigError: it can't be read, is not JSON, or is not an object.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelConfigError(f"{file} can't be read: {error}") from error
    except json.JSONDecodeError as error:
        raise ModelConfigError(f"{file} is not valid JSON (truncated?): {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{file} holds a JSON {type(value).__name__}, not an object")
    return value


class ConfigFields:
    """Fields of one JSON object. ``null`` counts as absent, as it does in transformers."""

    def __init__(self, raw: dict[str, Any], where: str) -> None:
        self.raw = raw
        self.where = where  # named in errors

    def has(self, name: str) -> bool:
        return self.raw.get(name) is not None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelConfigError(f"{self.where}: {name!r} must be a positive integer, not {value!r}")
        return value

    def count(self, name: str, default: int | None = None) -> int:
        """An integer that may be 0."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelConfigError(f"{self.where}: {name!r} must be an integer of 0 or more, not {value!r}")
        return value

    def optional_integer(self, name: str) -> int | None:
        return self.integer(name) if self.has(name) else None

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelConfigError(f"{self.where}: {name!r} must be a number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise ModelConfigError(f"{self.where}: {name!r} must be true or false, not {value!r}")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value(name, default)
        if not isinstance(value, str):
            raise ModelConfigError(f"{self.where}: {name!r} must be a string, not {value!r}")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """One integer or a list of them; absent: empty."""
        value = self.raw.get(name)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(v, bool) or not isinstance(v, int) for v in values):
            raise ModelConfigError(f"{self.where}: {name!r} must hold integers, not {value!r}")
        return tuple(values)

    def child(self, name: str) -> ConfigFields:
        """An object inside this one; absent: an empty one."""
        value = self.raw.get(name)
        if value is not None and not isinstance(value, dict):
            raise ModelConfigError(f"{self.where}: {name!r} must be an object, not {value!r}")
        return ConfigFields(value or {}, f"{self.where}: {name}")

    def _value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        if value is not None:
            return value
        if default is None:
            raise ModelConfigError(f"{self.where} lacks {name!r}")
        return default
