"""Logging set-up of every process of a server."""

from __future__ import annotations

import logging


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
