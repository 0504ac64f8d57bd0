"""Settings that SGLang takes from the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping

from sglang.srt.utils.flags import ServerArgsError


def is_true(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    return environ.get(name, "").strip().lower() in ("1", "true", "yes", "y", "on")


def seconds_from(name: str, environ: Mapping[str, str] = os.environ) -> float | None:
    """A time limit; unset or not above 0: none.

    Raises:
        ServerArgsError: it is no number.
    """
    text = environ.get(name, "").strip()
    try:
        value = float(text or 0)
    except ValueError:
        raise ServerArgsError(f"{name} must be a number of seconds, got {text!r}") from None
    return value if value > 0 else None
