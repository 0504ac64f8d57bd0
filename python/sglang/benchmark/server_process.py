"""A server of this package, started for a benchmark and ended with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from sglang.benchmark.server_info import ServerProblem

START_TIMEOUT_S: Final = 1800.0  # large checkpoints, and graphs to be captured
_STOP_S: Final = 60.0
_POLL_S: Final = 0.3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(words: Sequence[str], host: str, port: int, output: int = 2) -> Iterator[str]:
    """The base URL of ``python -m sglang.launch_server WORDS``, once it is healthy.

    ``output``: the descriptor of the file that has what it prints.

    Raises:
        ServerProblem: it did not start; its own messages are in ``output``.
    """
    command = [sys.executable, "-m", "sglang.launch_server", *words]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
    )
    try:
        url = f"http://{host}:{port}"
        _wait_until_healthy(process, url)
        yield url
    finally:
        _stop(process)


def _wait_until_healthy(process: subprocess.Popen[bytes], url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerProblem(f"the server ended with code {process.returncode} before it was ready")
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{url}/health", timeout=5):
            return
        time.sleep(_POLL_S)
    raise ServerProblem(f"the server was not ready within {START_TIMEOUT_S:.0f} s")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; whatever is left of its group a minute later is killed."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
