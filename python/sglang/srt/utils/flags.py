"""A command line made from a dataclass: each field's metadata is its row of the flag table."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NoReturn

from sglang.srt.utils.log import say

_KEY = "flag"
_LARGEST_INT = 2**63 - 1  # what every message and device can hold
_ALIKE = 0.77  # from here on an unknown word may be a known one with a mistake in it


class ServerArgsError(ValueError):
    """The configuration is not acceptable; the message is one line that says what to write."""


@dataclass(frozen=True, slots=True)
class Flag:
    kind: type  # bool: present or absent; else the type of the value
    group: str
    help: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]
    many: bool = False  # one or more values, kept as a tuple


def flag(
    default: Any,
    kind: type,
    group: str,
    help: str,
    *,
    choices: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    many: bool = False,
) -> Any:
    """A dataclass field that is also a command line flag of the same name."""
    return field(default=default, metadata={_KEY: Flag(kind, group, help, choices, aliases, many)})


def flags_of(table: type) -> dict[str, tuple[Flag, Any]]:
    """Field name -> (its flag, its default); the table's own before those it inherits."""
    own = table.__dict__["__annotations__"]
    rows = sorted((f for f in fields(table) if _KEY in f.metadata), key=lambda f: f.name not in own)
    return {f.name: (f.metadata[_KEY], f.default) for f in rows}


def option_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


class _OneLineParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        given = " takes no value; got "
        raise ServerArgsError(message.replace(": ignored explicit argument ", given))


def build_parser(table: type, prog: str, description: str) -> argparse.ArgumentParser:
    parser = _OneLineParser(prog=prog, usage="%(prog)s [flags]", description=description, allow_abbrev=False)
    groups: dict[str, Any] = {}
    for name, (row, default) in flags_of(table).items():
        group = groups.setdefault(row.group, parser.add_argument_group(row.group))
        names = [option_name(name), *row.aliases]
        if row.kind is bool:
            group.add_argument(*names, dest=name, action="store_true", default=default, help=row.help)
            continue
        shown = "" if default is None else f" (default: {default})"
        group.add_argument(
            *names,
            dest=name,
            type=_number(row.kind) if row.kind in (int, float) else row.kind,
            nargs="+" if row.many else None,
            choices=row.choices or None,
            default=default,
            help=row.help + shown,
            metavar=None if row.choices else row.kind.__name__.upper(),
        )
    return parser


def parse_flags(
    table: type,
    argv: Sequence[str],
    prog: str,
    description: str,
    refused: Mapping[str, str],
    given: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    """Field values from a command line.

    ``refused`` maps options that are known elsewhere to the reason why they are not taken here; ``given``:
    values (checked) of what the command line does not name.

    Raises:
        ServerArgsError: an unknown option, or a value of the wrong kind.
    """
    parser = build_parser(table, prog, description)
    for word in argv:
        option = word.partition("=")[0]
        if option in refused:
            raise ServerArgsError(refused[option])
    parser.set_defaults(**given)
    values, extra = parser.parse_known_args(list(argv))
    if extra:
        options = [o for name, (row, _) in flags_of(table).items() for o in (option_name(name), *row.aliases)]
        raise ServerArgsError(_unknown(extra[0], options))
    many = {name for name, (row, _) in flags_of(table).items() if row.many}
    return {k: tuple(v) if k in many and v is not None else v for k, v in vars(values).items()}


def check_keywords(table: type, values: Mapping[str, Any], refused: Mapping[str, str]) -> None:
    """The checks of ``parse_flags`` for values given as keyword arguments."""
    known = flags_of(table)
    for name, value in values.items():
        option = option_name(name)
        if name not in known:
            raise ServerArgsError(refused.get(option) or _unknown(name, list(known)))
        row, default = known[name]
        if value is None and default is None:
            continue
        if row.many and not isinstance(value, list | tuple):
            raise ServerArgsError(f"{name} must be a list of type {row.kind.__name__}, got {value!r}")
        for one in value if row.many else (value,):
            _check_keyword(name, row, one)


def _check_keyword(name: str, row: Flag, value: Any) -> None:
    accepted = (int, float) if row.kind is float else (row.kind,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and row.kind is not bool):
        raise ServerArgsError(f"{name} must be of type {row.kind.__name__}, got {value!r}")
    if type(value) is int and abs(value) > _LARGEST_INT:
        raise ServerArgsError(f"{name} must be a number of at most 64 bits, got {value!r}")
    if row.choices and value not in row.choices:
        raise ServerArgsError(f"{name} must be one of {', '.join(row.choices)}; got {value!r}")


def _number(kind: type) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            need = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"needs {need}, got {text!r}") from None
        if kind is int and abs(value) > _LARGEST_INT:
            raise argparse.ArgumentTypeError(f"needs a number of at most 64 bits, got {text!r}")
        return value

    return parse


def _unknown(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word.partition("=")[0], known, n=1, cutoff=_ALIKE)
    hint = f"did you mean {close[0]}?" if close else "--help lists what there is"
    what = "unknown flag" if word.startswith("-") else "unexpected argument"
    return f"{what} {word}: {hint}"


def refuse_empty(table: type, values: Mapping[str, Any]) -> None:
    """
    Raises:
        ServerArgsError: a text is given and says nothing (an unset variable of a script, most often).
    """
    for name in flags_of(table):
        if values.get(name) == "":
            raise ServerArgsError(f"{option_name(name)} is empty: give a value, or leave it out")


def exit_with_error(message: str) -> NoReturn:
    """The only way a wrong configuration ends: one line on stderr, exit code 1."""
    say(f"error: {' '.join(message.split())}")
    raise SystemExit(1)
