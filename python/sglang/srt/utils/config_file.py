"""``--config FILE``: flags from a YAML file, under their names with or without dashes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from sglang.srt.utils.flags import Flag, ServerArgsError, flags_of, option_name

_OPTION: Final = "--config"


def config_file(argv: Sequence[str]) -> str | None:
    """The file that a command line names; the last one, as for every flag."""
    found = None
    for word, following in zip(argv, [*argv[1:], None], strict=False):
        if word == _OPTION:
            found = following
        elif word.startswith(f"{_OPTION}="):
            found = word.partition("=")[2]
    return found or None  # nothing behind it: the parser says so


def read_config_file(file: str, table: type) -> dict[str, Any]:
    """Field values, of which the types are checked as those of keyword arguments are.

    Raises:
        ServerArgsError: the file can't be read, or is no mapping of flags.
    """
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ServerArgsError(f"--config {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ServerArgsError(f"--config {file} is not valid YAML: {error}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ServerArgsError(f"--config {file} must hold flags, one a line: tp-size: 2")
    names = _names(table)
    rows = flags_of(table)
    values: dict[str, Any] = {}
    for key, value in content.items():
        word = str(key).strip().lstrip("-").replace("_", "-")
        name = names.get(f"--{word}", word.replace("-", "_"))
        if name == "config":
            raise ServerArgsError(f"--config {file} names another file: give all flags in one")
        if name in values:
            raise ServerArgsError(f"--config {file} gives {option_name(name)} twice")
        values[name] = _value(rows[name][0], value) if name in rows else value
    return {name: value for name, value in values.items() if value is not None}


def _names(table: type) -> dict[str, str]:
    """Option, or one of its aliases -> field."""
    return {o: n for n, (row, _) in flags_of(table).items() for o in (option_name(n), *row.aliases)}


def _value(row: Flag, value: Any) -> Any:
    """YAML makes numbers, dates and mappings of what is text on a command line."""
    if isinstance(value, list):
        return [_scalar(row, item) for item in value]
    return [_scalar(row, value)] if row.many and value is not None else _scalar(row, value)


def _scalar(row: Flag, value: Any) -> Any:
    if row.kind is not str or value is None or isinstance(value, str | bool):
        return value
    return json.dumps(value) if isinstance(value, dict) else str(value)
