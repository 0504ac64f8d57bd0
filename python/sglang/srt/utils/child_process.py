"""Processes that never outlive their parent.

A child gets its configuration through a pipe on its standard input. The parent keeps the pipe open for as
long as it lives, so the child reads the end of it the moment the parent is gone, however it went.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

_PR_SET_PDEATHSIG = 1
_LENGTH_BYTES = 8
_PARENT_CHECK_S = 0.5
_KILLED_S = 2.0
"""Longest wait for a process that was killed: a driver may hold one whose GPU is stuck, and whoever waits
must still end in time. Nothing of it runs any more."""
_PACKAGE_PARENT = Path(__file__).resolve().parents[3]
_KILL_WITH_PARENT = b"\1"
_ONLY_WATCH_PARENT = b"\0"


@dataclass(frozen=True, slots=True)
class Child:
    name: str
    process: subprocess.Popen[bytes]

    def exit_code(self) -> int | None:
        return self.process.poll()


# ---- in the parent


def start_child(
    name: str,
    module: str,
    config: bytes,
    *,
    kill_with_parent: bool,
    environ: Mapping[str, str] = MappingProxyType({}),
) -> Child:
    """Run ``python -m module`` with ``config``; in the child, ``read_config`` returns it. ``environ``: added
    to the environment.

    Every child notices that its parent is gone (``end_with_parent``). ``kill_with_parent`` has the system
    kill it too, for one that may be too busy to notice; it can't clean up then, so one other must.
    """
    env = {**os.environ, **environ}
    inherited = env.get("PYTHONPATH")
    env["PYTHONPATH"] = os.pathsep.join([str(_PACKAGE_PARENT), *([inherited] if inherited else [])])
    # A process group of its own: Ctrl-C reaches the parent alone, which decides what it means.
    command = [sys.executable, "-m", module]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, process_group=0)
    assert process.stdin is not None
    # The system ties the death signal to the thread that starts the child: only the main thread
    # surely lives as long as the process.
    kill_with_parent &= threading.current_thread() is threading.main_thread()
    try:
        process.stdin.write(_KILL_WITH_PARENT if kill_with_parent else _ONLY_WATCH_PARENT)
        process.stdin.write(len(config).to_bytes(_LENGTH_BYTES, "little") + config)
        process.stdin.flush()
    except BrokenPipeError:
        pass  # it is dead already: its exit code says so
    return Child(name, process)


def stop_children(children: Sequence[Child], grace_s: float = 1.0) -> None:
    """Ask, wait, kill; returns when every one is gone, or can't be waited for."""
    if grace_s > 0:
        for child in children:
            if child.exit_code() is None:
                child.process.terminate()
        _wait_for(children, grace_s)
    for child in children:
        if child.exit_code() is None:
            child.process.kill()
    _wait_for(children, _KILLED_S)
    for child in children:
        if child.process.stdin is not None:
            child.process.stdin.close()


def _wait_for(children: Sequence[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            continue


def describe_exit(name: str, code: int) -> str:
    """One line for the user about a process that should not have ended."""
    if code < 0:
        try:
            how = f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            how = f"was killed by signal {-code}"
        return f"the {name} process {how}"
    return f"the {name} process ended with exit code {code}"


# ---- in the child


def read_config() -> bytes:
    """What the parent gave ``start_child``. Called once, before ``end_with_parent``."""
    source = sys.stdin.buffer
    if source.read(1) == _KILL_WITH_PARENT and sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    length = int.from_bytes(source.read(_LENGTH_BYTES), "little")
    config = source.read(length)
    if len(config) < length:
        raise SystemExit(1)  # the parent died before it had said anything
    return config


def end_with_parent(clean_up: Callable[[], Any]) -> None:
    """Run ``clean_up`` and end this process as soon as the parent is gone."""

    parent = os.getppid()

    def watch() -> None:
        # Looking at the parent's id too covers a pipe that another process has inherited (a fork of
        # the parent): it would stay open.
        while os.getppid() == parent:
            readable, _, _ = select.select([sys.stdin.fileno()], [], [], _PARENT_CHECK_S)
            if readable and not os.read(sys.stdin.fileno(), 1):
                break
        clean_up()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watcher", daemon=True).start()
