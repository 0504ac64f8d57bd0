"""A server whose clients two processes answer (--tokenizer-worker-num 2). Run alone: pytest THIS_FILE"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.server import Server, read_events
from helpers.tiny_models import write_tiny_llama
from helpers.tiny_tokenizer import write_byte_tokenizer

pytestmark = pytest.mark.long  # five processes: routes and ids are also in test_http_worker_routes.py

HEARD_S = 2.0
FLAGS = ["--tokenizer-worker-num", "2", "--enable-metrics", "--max-running-requests", "8"]
ENDLESS = {"max_new_tokens": 3000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    write_byte_tokenizer(folder)
    return folder


def start(model: Path, *flags: str) -> Server:
    environ = {"FAULTY_PAGES": "20000"}
    return Server("--model-path", str(model), *FLAGS, *flags, module="helpers.faulty_server", environ=environ)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    started = start(model)
    try:
        yield started.wait_ready()
    finally:
        started.stop()


def ask(server: Server, text: str, **sampling: Any) -> httpx.Response:
    """Over a connection of its own: the system deals these out to the workers."""
    body = {"text": text, "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=30)


class Streams:
    """Requests that stream, each over a connection of its own."""

    def __init__(self, server: Server, count: int, **sampling: Any) -> None:
        self.ends: list[Any] = [None] * count
        self.ended_ts = [0.0] * count
        self._server = server
        self._sampling = {**ENDLESS, **sampling}
        self._begun = [threading.Event() for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        assert all(begun.wait(20) for begun in self._begun)

    def _run(self, i: int) -> None:
        body = {"text": f"stream {i}", "rid": f"s{i}", "sampling_params": self._sampling, "stream": True}
        try:
            with httpx.stream("POST", f"{self._server.url}/generate", json=body, timeout=60) as response:
                for event in read_events(response):
                    self.ends[i] = event
                    self._begun[i].set()
        except httpx.TransportError:
            self.ends[i] = "lost"
        self.ended_ts[i] = time.monotonic()

    def wait(self) -> float:
        for thread in self._threads:
            thread.join(60)
        return max(self.ended_ts)


def log_of(server: Server, worker: int) -> list[str]:
    return [line for line in server.log().splitlines() if f"HTTP worker {worker}]" in line]


def test_both_answer_and_what_one_is_told_holds_for_both(server: Server) -> None:
    url = f"{server.url}/configure_logging"
    before = httpx.get(f"{server.url}/metrics").text
    assert "sglang:num_requests_total{" not in before or "} 1.0" in before  # the warm-up's at most
    assert httpx.post(url, json={"log_requests": True, "log_requests_level": 2}).status_code == 200
    texts = [ask(server, "one prompt", max_new_tokens=3, sampling_seed=1).json()["text"] for _ in range(16)]
    assert len(set(texts)) == 1
    finished = [sum("Finish: " in line for line in log_of(server, i)) for i in (1, 2)]
    assert sum(finished) == 16 and min(finished) >= 1
    httpx.post(url, json={"log_requests": False})
    lines = [line for line in httpx.get(f"{server.url}/metrics").text.splitlines() if "_total{" in line]
    (counted,) = [line for line in lines if line.startswith("sglang:num_requests_total{")]
    assert float(counted.split()[-1]) >= 16


def test_an_abort_by_id_finds_its_request_in_the_other_process(server: Server) -> None:
    streams = Streams(server, 5)
    for i in range(5):  # whichever process is asked, the name is taken
        body = {"text": "x", "rid": f"s{i}", "sampling_params": {"max_new_tokens": 1}}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=10)
        assert answer.status_code == 400 and f"rid 's{i}' is in use" in answer.json()["error"]["message"]
    began = time.monotonic()
    for i in range(5):
        assert httpx.post(f"{server.url}/abort_request", json={"rid": f"s{i}"}).status_code == 200
    assert streams.wait() - began < HEARD_S
    assert all(end["meta_info"]["finish_reason"]["type"] == "abort" for end in streams.ends)
    assert [end["meta_info"]["id"] for end in streams.ends] == [f"s{i}" for i in range(5)]


def test_control_through_any_of_them(server: Server) -> None:
    for _ in range(4):
        info = httpx.get(f"{server.url}/server_info").json()
        assert info["tokenizer_worker_num"] == 2 and info["status"] == "ready"
        assert httpx.post(f"{server.url}/flush_cache").status_code == 200
        assert httpx.get(f"{server.url}/health").status_code == 200
    assert httpx.post(f"{server.url}/pause_generation", json={"mode": "retract"}).status_code == 200
    held = [
        threading.Thread(target=ask, args=(server, f"h{i}"), kwargs={"max_new_tokens": 1}) for i in (1, 2)
    ]
    for thread in held:
        thread.start()
    held[0].join(0.3)
    assert all(thread.is_alive() for thread in held)
    assert httpx.post(f"{server.url}/continue_generation").status_code == 200
    for thread in held:
        thread.join(10)
        assert not thread.is_alive()


def test_a_worker_that_is_killed_takes_the_server_down_and_clients_hear(server: Server) -> None:
    """The last of this server."""
    streams = Streams(server, 6)
    workers = [one for one in server.members if any("http_worker" in word for word in one.cmdline())]
    assert len(workers) == 2
    began = time.monotonic()
    workers[0].kill()
    assert streams.wait() - began < HEARD_S
    told = [end for end in streams.ends if end != "lost" and "error" in end]
    assert all("HTTP worker" in end["error"]["message"] for end in told)
    assert len(told) + sum(end == "lost" for end in streams.ends) == 6
    server.wait_gone(8)
    assert server.process.returncode == 1 and "HTTP worker" in server.log()
    assert server.leftovers() == []


def test_sigterm_lets_requests_end_in_every_worker(model: Path) -> None:
    server = start(model, "--drain-timeout", "20").wait_ready()
    try:
        streams = Streams(server, 6, max_new_tokens=100)
        server.process.send_signal(signal.SIGTERM)
        streams.wait()
        assert all(end["meta_info"]["completion_tokens"] == 100 for end in streams.ends)
        server.wait_gone(8)
        assert server.process.returncode == 0 and server.leftovers() == []
    finally:
        server.stop()


@pytest.mark.parametrize("how", ["SIGINT", "RAISE", "scheduler killed", "launcher killed"])
def test_every_end_is_heard_of_by_all(model: Path, how: str) -> None:
    server = start(model).wait_ready()
    try:
        streams = Streams(server, 6)
        began = time.monotonic()
        if how == "SIGINT":
            server.process.send_signal(signal.SIGINT)
        elif how == "RAISE":
            ask(server, "RAISE", max_new_tokens=5)
        elif how == "scheduler killed":
            server.child("faulty_scheduler").kill()
        else:
            server.process.kill()
        assert streams.wait() - began < HEARD_S
        if how != "launcher killed":
            assert all("error" in end for end in streams.ends)
        server.wait_gone(8)
        assert server.process.returncode == {"SIGINT": 0, "launcher killed": -9}.get(how, 1)
        assert server.leftovers() == []
    finally:
        server.stop()
