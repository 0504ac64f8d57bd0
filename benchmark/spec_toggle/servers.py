"""Start and stop serving processes for a measurement."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

import httpx

REPOSITORY: Final = Path(__file__).resolve().parents[2]
LAUNCH_SERVER: Final = (sys.executable, "-m", "sglang.launch_server")
_LOG_LINES: Final = 25


class ServerError(RuntimeError):
    """A server did not start, or died; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server: its process group is its own, its output goes to ``log_path``."""

    name: str
    base_url: str
    process: subprocess.Popen[bytes]
    log_path: Path

    def send_signal(self, number: int) -> None:
        """Send a signal to every process of the server (SIGSTOP and SIGCONT freeze and thaw it)."""
        os.killpg(self.process.pid, number)

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""
        return "\n".join(text.splitlines()[-_LOG_LINES:])


def free_port() -> int:
    """Return a TCP port that is free now on the loopback interface."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running_server(
    name: str, arguments: Sequence[str], log_dir: Path, command: Sequence[str] = LAUNCH_SERVER
) -> Iterator[Server]:
    """Start a server on a free port and end it (all of its processes) when the block is left.

    It is not ready yet when the block begins: see `wait_until_healthy`.
    """
    port = free_port()
    log_path = log_dir / f"{name}.log"
    with open(log_path, "wb") as log:
        process = subprocess.Popen(
            [*command, *arguments, "--host", "127.0.0.1", "--port", str(port)],
            stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=_environment(os.environ), start_new_session=True,
        )  # fmt: skip
    server = Server(name, f"http://127.0.0.1:{port}", process, log_path)
    try:
        yield server
    finally:
        stop(server)


def wait_until_healthy(server: Server, timeout_s: float) -> None:
    """Wait until ``GET /health`` answers 200.

    Raises:
        ServerError: the server died, or did not answer in time.
    """
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = server.process.poll()
        if code is not None:
            raise ServerError(f"server {server.name!r} ended with code {code}:\n{server.log_tail()}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.base_url}/health", timeout=10.0).status_code == 200:
                return
        time.sleep(0.2)
    raise ServerError(f"server {server.name!r} was not healthy after {timeout_s:.0f} s:\n{server.log_tail()}")


def stop(server: Server, grace_s: float = 10.0) -> None:
    """End the server: SIGTERM to its launcher, then SIGKILL to whatever is left of its process group."""
    if server.process.poll() is None:
        server.send_signal(signal.SIGCONT)
        server.process.terminate()
        try:
            server.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            print(f"server {server.name!r} ignored SIGTERM for {grace_s:.0f} s: killing it", file=sys.stderr)
    with suppress(ProcessLookupError):  # the group is empty, as it should be
        server.send_signal(signal.SIGKILL)
    server.process.wait()


def exit_on_sigterm() -> None:
    """Make SIGTERM unwind the program like Ctrl-C does, so that started servers are stopped."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)


def embedded_arguments(threshold: int | str | None, num_steps: int, drafter: bool = True) -> list[str]:
    """Return launch arguments for the embedded model with explicit paths.

    Args:
        threshold: value of ``--speculative-disable-bs-threshold``; None leaves it unset (always speculate).
        num_steps: drafts of a speculative step (a chain).
        drafter: whether to serve with the embedded EAGLE-3 head at all.
    """
    model = _embedded()
    arguments = ["--model-path", model.embedded_model_path(), "--served-model-name", "SmolLM2-135M-Instruct"]
    if not drafter:
        return arguments
    arguments += ["--speculative-algorithm", "EAGLE3"]
    arguments += ["--speculative-draft-model-path", model.embedded_drafter_path()]
    arguments += ["--speculative-num-steps", str(num_steps), "--speculative-eagle-topk", "1"]
    arguments += ["--speculative-num-draft-tokens", str(num_steps + 1)]
    if threshold is not None:
        arguments += ["--speculative-disable-bs-threshold", str(threshold)]
    return arguments


def embedded_threshold() -> int:
    """Return the threshold that the embedded model is served with."""
    return int(_embedded().EMBEDDED_DISABLE_BS_THRESHOLD)


def _embedded() -> ModuleType:
    """Import what this checkout says about the embedded model."""
    sys.path.insert(0, str(REPOSITORY / "python"))
    return import_module("sglang.embedded.model")


def _environment(base: Mapping[str, str]) -> dict[str, Any]:
    """Return the child's environment: this checkout's package comes first."""
    paths = [str(REPOSITORY / "python"), base.get("PYTHONPATH", "")]
    return {**base, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}
