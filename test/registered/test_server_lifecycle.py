"""How servers end, and how they refuse to start. Run alone: pytest THIS_FILE

The servers of the first class start together: most of a start is waiting for imports.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.server import (
    Server,
    free_port,
    port_is_free,
    read_events,
    server_environment,
    speculative_flags,
    write_tiny_pair,
)
from helpers.tiny_models import write_tiny_llama

ENDLESS = {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True}
DRAIN_S = 4.0  # a busy machine needs a second for the question below
ENDINGS = ("SIGTERM", "SIGKILL", "scheduler", "detokenizer")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def servers(models: tuple[Path, Path]) -> Any:
    flags = ["--model-path", str(models[0]), *speculative_flags(models[1]), "--enable-metrics"]
    more = {"SIGTERM": ["--drain-timeout", str(DRAIN_S)]}
    started = {name: Server(*flags, *more.get(name, [])) for name in ENDINGS}
    try:
        yield {name: server.wait_ready() for name, server in started.items()}
    finally:
        for server in started.values():
            server.stop()


def ask(server: Server, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json=body, timeout=60)


def num_running(server: Server) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith("sglang:num_running_reqs{"))


class Clients:
    """One that streams and one that waits; what each got, and when it got the end of it."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.ended_ts: dict[str, float] = {}
        self.got: dict[str, Any] = {}
        self._first = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(name,)) for name in ("stream", "whole")]
        for thread in self._threads:
            thread.start()
        assert self._first.wait(30)

    def _run(self, name: str) -> None:
        try:
            self.got[name] = self._stream() if name == "stream" else self._whole()
        except httpx.TransportError as error:
            self.got[name] = error
        self.ended_ts[name] = time.monotonic()

    def _stream(self) -> list[Any]:
        body = {"text": "stream", "stream": True, "sampling_params": ENDLESS}
        got = []
        with httpx.stream("POST", f"{self._server.url}/generate", json=body, timeout=60) as response:
            for event in read_events(response):
                got.append(event)
                self._first.set()
        return got

    def _whole(self) -> httpx.Response:
        body = {"text": "whole", "sampling_params": ENDLESS}
        return ask(self._server, body)

    def wait(self) -> float:
        """When the last of them had its end."""
        for thread in self._threads:
            thread.join(60)
        return max(self.ended_ts.values())


def check_nothing_left(server: Server) -> None:
    assert port_is_free(server.port)
    assert server.leftovers() == []


def test_sigterm_drains_then_ends_everything_and_answers_clients(servers: dict[str, Server]) -> None:
    server = servers["SIGTERM"]
    clients = Clients(server)
    with ThreadPoolExecutor(1) as pool:
        short = pool.submit(
            ask, server, {"text": "short", "sampling_params": {**ENDLESS, "max_new_tokens": 50}}
        )
        while num_running(server) < 3 and not short.done():
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        while (refused := ask(server, {"text": "late", "sampling_params": {"max_new_tokens": 1}})).is_success:
            assert time.monotonic() < began + 1  # the signal is on its way
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        assert "shutting down" in refused.json()["error"]["message"]
        assert httpx.get(f"{server.url}/health").status_code == 503  # a balancer sends no more
        assert short.result().json()["meta_info"]["completion_tokens"] == 50
    server.wait_gone(DRAIN_S + 4)
    assert clients.wait() - began > DRAIN_S - 0.2
    assert server.process.returncode == 0
    assert "shutting down" in clients.got["stream"][-1]["error"]["message"]
    assert clients.got["whole"].status_code == 503
    assert "Traceback" not in server.log()
    check_nothing_left(server)


def test_kill_9_of_the_launcher_ends_everything(servers: dict[str, Server]) -> None:
    server = servers["SIGKILL"]
    clients = Clients(server)
    server.process.kill()
    server.wait_gone(5.0)
    clients.wait()
    check_nothing_left(server)


@pytest.mark.parametrize("name", ["scheduler", "detokenizer"])
def test_a_dead_process_takes_the_server_down(servers: dict[str, Server], name: str) -> None:
    server = servers[name]
    clients = Clients(server)
    killed_ts = time.monotonic()
    server.child(f"managers.{name}").kill()
    assert clients.wait() - killed_ts < 2.0
    server.wait_gone(5.0)
    message = f"the {name} process was killed by SIGKILL"
    assert message in clients.got["stream"][-1]["error"]["message"]
    assert clients.got["whole"].status_code == 500
    assert message in clients.got["whole"].json()["error"]["message"]
    assert server.process.returncode == 1
    assert f"error: {message}" in server.log()
    assert "Traceback" not in server.log()
    check_nothing_left(server)


# ---- starts that fail


def broken_starts(folder: Path, models: tuple[Path, Path]) -> dict[str, tuple[list[str], str]]:
    """Name -> flags, and a word of the one line that must come."""
    target, drafter = map(str, models)
    unknown = write_tiny_llama(folder / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    truncated, _ = write_tiny_pair(folder / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    without = write_tiny_llama(folder / "without")
    eagle = ["--speculative-algorithm", "EAGLE3"]
    return {
        "nonexistent": (["--model-path", str(folder / "nowhere")], "does not exist"),
        "architecture": (["--model-path", str(unknown)], "MambaForCausalLM"),
        "truncated": (["--model-path", str(truncated)], "model.safetensors"),
        "no tokenizer": (["--model-path", str(without)], "tokenizer.json"),
        "unknown flag": (["--model-path", target, "--tmp-size", "2"], "--tp-size"),
        "upstream flag": (["--model-path", target, "--quantization", "fp8"], "--quantization"),
        "bad value": (["--model-path", target, "--page-size", "0"], "--page-size"),
        "no drafter": (["--model-path", target, *eagle], "--speculative-draft-model-path"),
        "swapped": (["--model-path", drafter], "draft"),
        "target as drafter": (
            ["--model-path", target, *eagle, "--speculative-draft-model-path", target], "LlamaForCausalLM"
        ),
        "threshold": (["--model-path", target, "--speculative-disable-bs-threshold", "2"], "EAGLE3"),
        "template": (["--model-path", target, "--chat-template", "nowhere.jinja"], "nowhere.jinja"),
        "memory": (["--model-path", target, "--mem-fraction-static", "1e-9"], "--mem-fraction-static"),
    }  # fmt: skip


def launch_and_wait(flags: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    port = [] if "--port" in flags else ["--port", str(free_port())]
    command = [sys.executable, "-m", "sglang.launch_server", *flags, *port]
    env = server_environment(folder)
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)


def check_one_line(done: subprocess.CompletedProcess[str], word: str) -> None:
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1 and word in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1] == errors[0]


def test_a_wrong_start_is_one_line_and_exit_code_1(tmp_path: Path, models: tuple[Path, Path]) -> None:
    cases = broken_starts(tmp_path, models)
    with tempfile.TemporaryDirectory(prefix="t") as run_folder:
        run = Path(run_folder)
        with ThreadPoolExecutor(4) as pool:
            done = dict(
                zip(cases, pool.map(lambda case: launch_and_wait(case[0], run), cases.values()), strict=True)
            )
        for name, (_, word) in cases.items():
            check_one_line(done[name], word)
        assert list(run.iterdir()) == []


def test_a_port_in_use(models: tuple[Path, Path], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = launch_and_wait(["--model-path", str(models[0]), "--port", str(port)], tmp_path)
    check_one_line(done, str(port))


def test_ctrl_c_while_it_loads(models: tuple[Path, Path]) -> None:
    server = Server("--model-path", str(models[0]))
    try:
        deadline = time.monotonic() + 60
        while "Starting the scheduler" not in server.log() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)  # into the imports of the children
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(5) == 0
        assert "Traceback" not in server.log()
        assert server.leftovers() == []
    finally:
        server.stop()
