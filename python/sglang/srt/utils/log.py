"""Logging set-up of every process of a server."""

from __future__ import annotations

import logging
import sys
import traceback
from contextlib import suppress


def configure_logging(level: str, process_name: str = "") -> None:
    """``[time process] message`` on stderr. Libraries stay quiet unless something is wrong."""
    name = f" {process_name}" if process_name else ""
    logging.basicConfig(
        level=logging.WARNING,
        format=f"[%(asctime)s{name}] %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
        force=True,
    )
    logging.getLogger("sglang").setLevel(level.upper())


def say(line: str) -> None:
    """On stderr, beside the log. Where that can't be written (a disk is full) nothing else goes wrong."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def say_traceback() -> None:
    """Of the exception that is being handled."""
    say(traceback.format_exc().rstrip())


def flush_log() -> None:
    with suppress(OSError, ValueError):
        sys.stderr.flush()
