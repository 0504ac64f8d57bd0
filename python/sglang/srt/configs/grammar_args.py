"""The flags of structured output."""

from __future__ import annotations

from typing import Final

from sglang.srt.utils.flags import ServerArgsError

NO_BACKEND: Final = "none"
BACKENDS: Final = ("xgrammar", "llguidance", NO_BACKEND)


def check_grammar_flags(backend: str, whitespace_pattern: str | None, no_whitespace: bool) -> None:
    """
    Raises:
        ServerArgsError: a flag that would change nothing.
    """
    if whitespace_pattern is not None and backend != "llguidance":
        raise ServerArgsError("--constrained-json-whitespace-pattern needs --grammar-backend llguidance")
    if no_whitespace and backend == NO_BACKEND:
        raise ServerArgsError(
            "--constrained-json-disable-any-whitespace needs a grammar backend, and --grammar-backend none is"
            " given: leave one of them out"
        )
    if no_whitespace and whitespace_pattern is not None:
        raise ServerArgsError(
            "--constrained-json-disable-any-whitespace and --constrained-json-whitespace-pattern contradict"
            " each other: give one of them"
        )
