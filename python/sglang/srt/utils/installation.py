"""Checks of the Python environment the server is installed in."""

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Final

_UPSTREAM_DISTRIBUTION: Final = "sglang"


def upstream_conflict() -> str:
    """One line for the user where the distribution ``sglang`` is installed too; else nothing.

    Both distributions provide the import package ``sglang``: which files Python would load, and whose, would
    depend on the order of installation.
    """
    try:
        found = version(_UPSTREAM_DISTRIBUTION)
    except PackageNotFoundError:
        return ""
    return (
        f"the distribution {_UPSTREAM_DISTRIBUTION} {found} is installed in this environment"
        f" ({sys.prefix}) and provides the same import package: run `pip uninstall {_UPSTREAM_DISTRIBUTION}`,"
        " or install sglang-toggle in an environment of its own."
    )
