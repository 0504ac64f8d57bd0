"""Processor time of a server's processes, by what they are."""

import psutil

_NAMES = (
    ("scheduler", "scheduler"),
    ("detokenizer", "detokenizer"),
    ("http_worker", "http worker"),
)


def _name(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((name for part, name in _NAMES if part in words), "http")


def cpu_seconds(pid: int) -> dict[str, float]:
    """Name -> seconds so far; processes of one name are added up."""
    totals: dict[str, float] = {}
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        used = process.cpu_times()
        totals[_name(process)] = totals.get(_name(process), 0.0) + used.user + used.system
    return totals
