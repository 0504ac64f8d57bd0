"""Servers for tests, as processes: started, asked, and gone at the end whatever happened."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
from helpers.tiny_models import write_tiny_eagle3, write_tiny_llama
from helpers.tiny_tokenizer import write_byte_tokenizer

PYTHON_ROOT = Path(__file__).resolve().parents[2] / "python"
TEST_ROOT = Path(__file__).resolve().parents[1]
START_TIMEOUT_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def write_tiny_pair(folder: Path, seed: int = 0, **config: Any) -> tuple[Path, Path]:
    """A tiny Llama with a byte tokenizer, and a drafter that agrees with it often."""
    fields = {"max_position_embeddings": 4096, **config}
    target = write_tiny_llama(folder / "target", seed, **fields)
    write_byte_tokenizer(target)
    return target, write_tiny_eagle3(folder / "drafter", target, seed)


def speculative_flags(drafter: Path, *, threshold: int | None = None) -> list[str]:
    flags = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(drafter)]
    flags += ["--speculative-num-steps", "3"]
    return flags if threshold is None else [*flags, "--speculative-disable-bs-threshold", str(threshold)]


def server_environment(folder: Path) -> dict[str, str]:
    """Its run folders lie in ``folder``, so that a test sees what is left behind."""
    env = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join(
        [str(PYTHON_ROOT), str(TEST_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return env


class Server:
    """One launched server. ``wait_ready`` before asking; ``stop`` at the end."""

    def __init__(
        self,
        *flags: str,
        port: int | None = None,
        module: str = "sglang.launch_server",
        environ: Mapping[str, str] = MappingProxyType({}),
        log: str | None = None,
    ) -> None:
        """``log``: a file for its output; without it ``log()`` has that."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._temporary = tempfile.TemporaryDirectory(prefix="t")
        self.folder = Path(self._temporary.name)
        self._log = open(log or self.folder / "log", "r+b" if log else "w+b")  # noqa: SIM115  (closed in stop)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "--port", str(self.port), *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**server_environment(self.folder), **environ},
            start_new_session=True,  # what a terminal does: Ctrl-C goes to the whole group
        )
        self.members: list[psutil.Process] = []

    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> Server:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2).status_code == 200:
                    self.members = [psutil.Process(self.process.pid), *self._children()]
                    return self
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError(f"the server was not ready after {timeout_s} s:\n{self.log()}")

    def _children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def child(self, name: str) -> psutil.Process:
        found = [p for p in self._children() if any(name in word for word in p.cmdline())]
        assert len(found) == 1, f"{name}: {found}"
        return found[0]

    def alive(self) -> list[psutil.Process]:
        return [p for p in self.members if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def wait_gone(self, timeout_s: float) -> float:
        """How long it took until every process had ended."""
        began = time.monotonic()
        while time.monotonic() < began + timeout_s:
            if self.process.poll() is not None and not self.alive():
                return time.monotonic() - began
            time.sleep(0.05)
        raise AssertionError(f"still there after {timeout_s} s: {self.alive()}\n{self.log()}")

    def leftovers(self) -> list[str]:
        return sorted(p.name for p in self.folder.iterdir() if p.name != "log")

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for member in self.alive():
            member.kill()
        self._log.close()
        self._temporary.cleanup()


class ServerTestCase(unittest.TestCase):
    """Launches one server for a class, as upstream's suites do. Override ``server_flags``."""

    headers: dict[str, bytes] = {}  # of every request
    server: Server
    client: httpx.Client
    models: Path
    _models_folder: tempfile.TemporaryDirectory[str]

    @classmethod
    def server_flags(cls) -> list[str]:
        target, drafter = write_tiny_pair(cls.models)
        return ["--model-path", str(target), *speculative_flags(drafter)]

    @classmethod
    def setUpClass(cls) -> None:
        cls._models_folder = tempfile.TemporaryDirectory(prefix="models")
        cls.models = Path(cls._models_folder.name)
        cls.server = Server(*cls.server_flags())
        cls.addClassCleanup(cls._models_folder.cleanup)
        cls.addClassCleanup(cls.server.stop)
        cls.server.wait_ready()
        cls.client = httpx.Client(base_url=cls.server.url, timeout=60, headers=cls.headers)
        cls.addClassCleanup(cls.client.close)

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def generate(self, **body: Any) -> Any:
        response = self.post("/generate", **body)
        self.assertEqual(response.status_code, 200, response.text)
        return response.json()

    def stream(self, path: str, **body: Any) -> list[Any]:
        with self.client.stream("POST", path, json={**body, "stream": True}) as response:
            self.assertEqual(response.status_code, 200)
            return list(read_events(response))

    def server_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self.client.get("/server_info").json()["internal_states"][0]
        return state

    def wait_until_idle(self, timeout_s: float = 10.0) -> float:
        began = time.monotonic()
        while time.monotonic() < began + timeout_s:
            state = self.server_state()
            if state["num_running_reqs"] == 0 and state["num_queue_reqs"] == 0:
                return time.monotonic() - began
            time.sleep(0.05)
        raise AssertionError(f"requests still run after {timeout_s} s: {state}")


def read_events(response: httpx.Response) -> Iterator[Any]:
    """The values of a stream of server-sent events; checks that it ends with [DONE]."""
    done = False
    for line in response.iter_lines():
        if not line:
            continue
        assert line.startswith("data: ") and not done, line
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            done = True
        else:
            yield json.loads(data)
    assert done, "the stream did not end with [DONE]"
