"""What a grammar is, and what the rest of the server asks of a library that knows grammars. Plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from sglang.srt.sampling.sampling_params import SamplingParams

Masks = npt.NDArray[np.int32]
"""[N, words]: bit ``t % 32`` of word ``t // 32`` of a row says whether token ``t`` may be chosen."""

MOST_NESTED: Final = 100
"""Levels of a JSON schema's text."""

ANYTHING: Final = -1
"""A word of a mask that forbids nothing."""

FIXED_FORM: Final = MappingProxyType({"x-guidance": {"whitespace_flexible": False}})
"""In a JSON schema (llguidance's name for it): no white space but what the backend's fixed form has."""


class GrammarError(ValueError):
    """A grammar that can't be used; the message is for the user who sent it."""


class GrammarKind(StrEnum):
    JSON = "json_schema"
    REGEX = "regex"
    EBNF = "ebnf"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    kind: GrammarKind
    text: str

    def params(self) -> dict[str, str]:
        """As a sampling parameter."""
        return {self.kind.value: self.text}


def spec_of(params: SamplingParams) -> GrammarSpec | None:
    """The grammar that a request asks for; there is at most one."""
    for kind in GrammarKind:
        text = getattr(params, kind.value)
        if text is not None:
            return GrammarSpec(kind, text)
    return None


@dataclass(frozen=True, slots=True)
class JsonOptions:
    """--constrained-json-*."""

    whitespace_pattern: str | None = None
    any_whitespace: bool = True


class Matcher(Protocol):
    """How far one text has come in its grammar."""

    @property
    def is_terminated(self) -> bool:
        """Whether the text has ended: an end-of-text token has been accepted."""
        ...

    def accept(self, token: int) -> bool:
        """Go on with ``token``; False, and nothing changes, if the grammar forbids it."""
        ...

    def rollback(self, count: int) -> None:
        """Take back the last ``count`` tokens accepted."""
        ...

    def fill(self, masks: Masks, row: int) -> None:
        """The tokens that may come next. Not for a text that has ended."""
        ...


class CompiledGrammar(Protocol):
    @property
    def num_bytes(self) -> int: ...

    def matcher(self) -> Matcher:
        """Of a text that has no token yet."""
        ...


class GrammarBackend(Protocol):
    """Called by several threads."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """
        Raises:
            GrammarError: the grammar is wrong, or has a part that this backend does not know.
        """
        ...


def check_json(spec: GrammarSpec) -> None:
    """Compilers take the cube of the nesting's depth.

    Raises:
        GrammarError: the grammar's text is no JSON, or is nested too deeply.
    """
    too_deep = f"the {spec.kind.value} is nested deeper than {MOST_NESTED} levels: simplify it"
    try:
        whole = json.loads(spec.text)
    except RecursionError as error:
        raise GrammarError(too_deep) from error
    except ValueError as error:
        raise GrammarError(f"the {spec.kind.value} can't be used: it is no JSON ({error})") from error
    level = [whole]
    for _ in range(MOST_NESTED + 1):
        level = [value for value in level if isinstance(value, dict | list)]
        if not level:
            return
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    raise GrammarError(too_deep)


def has_fixed_form(spec: GrammarSpec) -> bool:
    schema = json.loads(spec.text) if "x-guidance" in spec.text else {}
    name, value = next(iter(FIXED_FORM.items()))
    return isinstance(schema, dict) and schema.get(name) == value


def allow(mask: Masks, token: int) -> None:
    """Set the bit of ``token`` in ``mask`` [words]."""
    mask.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


def one_line(complaint: str) -> str:
    """A library's complaint without the place in its source, of bounded length."""
    text = " ".join(complaint.split())
    if text.startswith("[") and ": " in text:  # "[time] file:line: what is wrong"
        text = text.partition(": ")[2]
    return text[:500]
