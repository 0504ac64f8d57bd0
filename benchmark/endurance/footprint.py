"""What a server holds: memory and descriptors of its processes, requests, KV places; is it flat?"""

import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http_streaming"))
from server_cpu import process_name

MEMORY_PART: Final = 0.03  # growth of a process's memory that is no leak,
MEMORY_BYTES: Final = 8 << 20  # and so much beside it: allocators don't give everything back
DESCRIPTORS: Final = 4  # a probe's own connection, a log that was opened
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessUse:
    resident_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """``at_s``: since the begin of the run."""

    at_s: float
    processes: Mapping[str, ProcessUse]


def look(pid: int, began: float) -> Footprint:
    """At the server's processes; those of one name are told apart by a number."""
    found: dict[str, ProcessUse] = {}
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        name = process_name(process)
        name = name if name not in found else f"{name} {sum(n.startswith(name) for n in found) + 1}"
        found[name] = ProcessUse(process.memory_info().rss, process.num_fds(), process.num_threads())
    return Footprint(time.monotonic() - began, found)


def growth(samples: Sequence[Footprint], window_s: float) -> tuple[list[str], list[str]]:
    """A line for each process, first window beside last one (medians), and a line for each that grew."""
    end = samples[-1].at_s
    first = [one for one in samples if one.at_s <= samples[0].at_s + window_s]
    last = [one for one in samples if one.at_s >= end - window_s]
    lines, grown = [], []
    for name in samples[0].processes:
        before, after = _median(first, name), _median(last, name)
        lines.append(
            f"{name}: {before.resident_bytes / _MIB:.0f} to {after.resident_bytes / _MIB:.0f} MiB,"
            f" {before.descriptors} to {after.descriptors} descriptors,"
            f" {before.threads} to {after.threads} threads"
        )
        more = after.resident_bytes - before.resident_bytes
        if more > before.resident_bytes * MEMORY_PART + MEMORY_BYTES:
            grown.append(f"the memory of {name} grew by {more / _MIB:.0f} MiB")
        if after.descriptors > before.descriptors + DESCRIPTORS:
            grown.append(f"{name} has {after.descriptors - before.descriptors} more descriptors")
        if after.threads > before.threads + DESCRIPTORS:
            grown.append(f"{name} has {after.threads - before.threads} more threads")
    return lines, grown


def _median(samples: Sequence[Footprint], name: str) -> ProcessUse:
    uses = [sample.processes[name] for sample in samples]
    return ProcessUse(
        int(statistics.median(use.resident_bytes for use in uses)),
        int(statistics.median(use.descriptors for use in uses)),
        int(statistics.median(use.threads for use in uses)),
    )


def held_when_idle(url: str, timeout_s: float = 20.0) -> list[str]:
    """What a server without requests still holds: requests, KV places. Empty: nothing, as it should be.

    Slots show as KV places and as requests that can't be admitted: every request has one of each.
    """
    deadline = time.monotonic() + timeout_s
    while held := _held(url):
        if time.monotonic() > deadline:
            return held
        time.sleep(0.2)  # the last step may still be on its way
    flushed = httpx.post(f"{url}/flush_cache", timeout=20)
    if flushed.status_code != 200:
        return [f"the cache can't be flushed: {flushed.text.strip()}"]
    httpx.post(f"{url}/generate", json={"text": "x", "sampling_params": {"max_new_tokens": 1}}, timeout=20)
    httpx.post(f"{url}/flush_cache", timeout=20)
    free, total = metric(url, "sglang:kv_available_tokens"), metric(url, "sglang:max_total_num_tokens")
    return [] if free == total else [f"{total - free:.0f} of {total:.0f} KV places stay after a flush"]


def _held(url: str) -> list[str]:
    state = httpx.get(f"{url}/server_info", timeout=30).json()["internal_states"][0]
    running, waiting, used = (
        state["num_running_reqs"], state["num_queue_reqs"], metric(url, "sglang:num_used_tokens"),
    )  # fmt: skip
    held = [f"{running} requests still run, {waiting} still wait"] if running or waiting else []
    return [*held, f"{used:.0f} KV places are in use"] if used else held


def metric(url: str, name: str) -> float:
    """The sum of the samples of that name in /metrics."""
    lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))
