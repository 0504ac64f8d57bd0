"""Processor time of a server's processes, by what they are."""

import psutil

_NAMES = (("scheduler", "scheduler"), ("detokenizer", "detokenizer"), ("http_worker", "http worker"))


def process_name(process: psutil.Process) -> str:
    """By the module that it runs; the launcher is "http", which it serves unless it has workers for that."""
    words = process.cmdline()
    module = words[words.index("-m") + 1] if "-m" in words[:-1] else ""
    return next((name for part, name in _NAMES if part in module), "http")


def cpu_seconds(pid: int) -> dict[str, float]:
    """Name -> seconds so far; processes of one name are added up."""
    totals: dict[str, float] = {}
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        used = process.cpu_times()
        totals[process_name(process)] = totals.get(process_name(process), 0.0) + used.user + used.system
    return totals
