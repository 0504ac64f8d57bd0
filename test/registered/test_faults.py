"""Faults end as docs/faults.md has it, and clients hear of them. Run alone: pytest THIS_FILE

Killed processes: test_server_lifecycle.py. A killed rank: test_tensor_parallel.py.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers.faulty_server import NUM_PAGES
from helpers.server import Server, read_events
from helpers.tiny_models import write_tiny_llama
from helpers.tiny_tokenizer import write_byte_tokenizer

HEARD_S = 2.0
ENDLESS = {"max_new_tokens": 500, "ignore_eos": True, "temperature": 0}
ALL = {"abort_all": True}
ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_llama(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    write_byte_tokenizer(folder)
    return folder


def start(model: Path, *flags: str, **kwargs: Any) -> Server:
    return Server("--model-path", str(model), *flags, module="helpers.faulty_server", **kwargs)


@pytest.fixture(scope="module")
def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """One that lives through its faults, one that does not."""
    lasting = ["--admin-api-key", "admin", "--max-queued-requests", "2", "--max-running-requests", "3"]
    dump = str(tmp_path_factory.mktemp("dumps"))
    started = {
        "lasting": start(model, *lasting, "--enable-metrics"),
        "raising": start(model, "--crash-dump-folder", dump),
    }
    try:
        yield {name: server.wait_ready() for name, server in started.items()}
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture
def lasting(servers: dict[str, Server]) -> Server:
    return servers["lasting"]


def ask(server: Server, text: str, **sampling: Any) -> httpx.Response:
    body = {"text": text, "sampling_params": {"temperature": 0, "ignore_eos": True, **sampling}}
    return httpx.post(f"{server.url}/generate", json=body, timeout=30)


class Clients:
    """``count`` requests at once, half of them streaming; what each got, and when it had its end."""

    def __init__(self, server: Server, count: int, **sampling: Any) -> None:
        self._server = server
        self._params = {**ENDLESS, **sampling}
        self.got: list[Any] = [None] * count
        self.ended_ts = [0.0] * count
        self._first = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()
        assert self._first.wait(20)

    def _run(self, i: int) -> None:
        prompt = f"client {i}"
        body = {"text": prompt, "sampling_params": self._params, "stream": i % 2 == 0}
        with httpx.stream("POST", f"{self._server.url}/generate", json=body, timeout=60) as response:
            if i % 2 or response.status_code != 200:
                self.got[i] = (response.status_code, json.loads(response.read()))
            else:
                events = []
                for event in read_events(response):
                    events.append(event)
                    self._first.set()
                self.got[i] = (200, events[-1])
        self.ended_ts[i] = time.monotonic()

    def wait(self) -> float:
        for thread in self._threads:
            thread.join(60)
        return max(self.ended_ts)

    def failed_with(self, words: str, status: int) -> bool:
        """Every one of them; a stream has status 200 and says it in its last event."""
        return all(words in answer["error"]["message"] and code in (status, 200) for code, answer in self.got)


def gauge(server: Server, name: str) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"sglang:{name}{{"))


def pages_in_use(server: Server) -> float:
    return gauge(server, "num_used_tokens")


# ---- one request's own


def test_nan_in_one_row_ends_that_request_alone(lasting: Server) -> None:
    clients = Clients(lasting, 2, max_new_tokens=60)
    began = time.monotonic()
    broken = ask(lasting, "NAN", max_new_tokens=10)
    assert time.monotonic() - began < HEARD_S
    assert broken.status_code == 500 and "not finite" in broken.json()["error"]["message"]
    clients.wait()
    assert all(answer["meta_info"]["completion_tokens"] == 60 for _, answer in clients.got)
    assert ask(lasting, "next", max_new_tokens=3).status_code == 200


def test_out_of_pages_a_lone_request_ends_and_the_next_is_served(lasting: Server) -> None:
    began = time.monotonic()
    response = ask(lasting, "x" * (NUM_PAGES - 50), max_new_tokens=100)
    assert response.status_code == 500 and time.monotonic() - began < HEARD_S
    assert f"KV cache of {NUM_PAGES} tokens is full" in response.json()["error"]["message"]
    assert ask(lasting, "next", max_new_tokens=3).status_code == 200


def test_out_of_pages_several_requests_take_turns(lasting: Server) -> None:
    clients = Clients(lasting, 3, max_new_tokens=100)
    clients.wait()
    figures = [answer["meta_info"] for _, answer in clients.got]
    # Whether one is retracted hangs on when they arrive; that it loses nothing is what counts.
    assert [one["completion_tokens"] for one in figures] == [100] * 3


# ---- too much to do


def test_a_full_queue_refuses_and_is_no_death(lasting: Server) -> None:
    clients = Clients(lasting, 3)
    waiting = [
        threading.Thread(target=ask, args=(lasting, f"w{i}"), kwargs={"max_new_tokens": 1}) for i in (1, 2)
    ]
    for thread in waiting:
        thread.start()
    deadline = time.monotonic() + 5
    while httpx.get(f"{lasting.url}/server_info").json()["internal_states"][0]["num_queue_reqs"] < 2:
        assert time.monotonic() < deadline
    refused = ask(lasting, "too many", max_new_tokens=1)
    assert refused.status_code == 503 and "queue is full" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    for path in ("health", "health_generate"):
        assert httpx.get(f"{lasting.url}/{path}", timeout=20).status_code == 200
    assert httpx.post(f"{lasting.url}/abort_request", json=ALL, headers=ADMIN).status_code == 200
    clients.wait()
    for thread in waiting:
        thread.join()


# ---- the administrator


def test_a_pause_holds_everything_and_only_the_admin_may(lasting: Server) -> None:
    pause, resume = f"{lasting.url}/pause_generation", f"{lasting.url}/continue_generation"
    assert httpx.post(pause).status_code == 401
    clients = Clients(lasting, 2, max_new_tokens=80)
    assert httpx.post(pause, json={"mode": "retract"}, headers=ADMIN).status_code == 200
    assert httpx.post(f"{lasting.url}/flush_cache", headers=ADMIN).status_code == 200
    assert pages_in_use(lasting) == 0
    assert httpx.get(f"{lasting.url}/health").status_code == 200
    late = threading.Thread(target=ask, args=(lasting, "late"), kwargs={"max_new_tokens": 1})
    late.start()
    late.join(0.3)
    assert late.is_alive() and not any(clients.ended_ts)
    assert httpx.post(resume, headers=ADMIN).status_code == 200
    clients.wait()
    late.join(10)
    assert all(answer["meta_info"]["completion_tokens"] == 80 for _, answer in clients.got)
    assert httpx.post(pause, json={"mode": "stop"}, headers=ADMIN).status_code == 400
    clients = Clients(lasting, 2)
    deadline = time.monotonic() + 10
    while gauge(lasting, "num_running_reqs") < 2:  # whoever comes after the pause is held, not aborted
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert httpx.post(pause, headers=ADMIN).status_code == 200  # abort
    clients.wait()
    assert all(answer["meta_info"]["finish_reason"]["type"] == "abort" for _, answer in clients.got)
    assert httpx.post(resume, headers=ADMIN).status_code == 200
    assert ask(lasting, "next", max_new_tokens=1).status_code == 200


def test_requests_are_logged_from_now_on(lasting: Server) -> None:
    url = f"{lasting.url}/configure_logging"
    assert httpx.post(url, json={"log_requests": True}).status_code == 401
    changed = httpx.post(url, json={"log_requests": True, "log_requests_level": 2}, headers=ADMIN)
    assert changed.json() == {"log_requests": True, "log_requests_level": 2}
    assert ask(lasting, "seen in the log", max_new_tokens=1).status_code == 200
    assert "seen in the log" in lasting.log() and "Finish: " in lasting.log()
    httpx.post(url, json={"log_requests": False}, headers=ADMIN)
    ask(lasting, "not seen any more", max_new_tokens=1)
    assert "not seen any more" not in lasting.log()


def test_all_requests_are_ended_by_the_admin_alone(lasting: Server) -> None:
    url = f"{lasting.url}/abort_request"
    clients = Clients(lasting, 2)
    assert httpx.post(url, json=ALL).status_code == 401
    assert httpx.post(url, json=ALL, headers=ADMIN).status_code == 200
    clients.wait()
    assert all(answer["meta_info"]["finish_reason"]["type"] == "abort" for _, answer in clients.got)


# ---- the server's


def test_an_executor_that_raises_ends_the_server_and_leaves_a_dump(servers: dict[str, Server]) -> None:
    server = servers["raising"]
    ask(server, "before", max_new_tokens=2)
    clients = Clients(server, 2)
    began = time.monotonic()
    broken = ask(server, "RAISE", max_new_tokens=5)
    assert clients.wait() - began < HEARD_S
    assert broken.status_code == 500 and clients.failed_with("the executor broke, as ordered", 500)
    server.wait_gone(5)
    assert server.process.returncode == 1 and "error: the scheduler process failed" in server.log()
    folder = Path(server.process.args[server.process.args.index("--crash-dump-folder") + 1])  # type: ignore
    (file,) = folder.iterdir()
    dump = json.loads(file.read_text())
    assert "as ordered" in dump["reason"]
    assert {one["prompt"] for one in dump["running"]} == {"RAISE", *(f"client {i}" for i in range(2))}
    assert [one["prompt"] for one in dump["finished"]] == ["before"]


@pytest.mark.long
def test_a_step_that_hangs_ends_the_server(model: Path) -> None:
    server = start(model, "--watchdog-timeout", "1.5", "--soft-watchdog-timeout", "0.5")
    try:
        server.wait_ready()
        clients = Clients(server, 2)
        began = time.monotonic()
        ask(server, "HANG", max_new_tokens=5)
        assert clients.wait() - began < 1.5 + HEARD_S
        assert clients.failed_with("a step has not ended for more than 1.5 s (--watchdog-timeout)", 500)
        server.wait_gone(5)
        assert server.process.returncode == 1
        assert "(--soft-watchdog-timeout)" in server.log() and "faulty_server.py" in server.log()
    finally:
        server.stop()


@pytest.mark.long
def test_a_scheduler_that_is_stopped_ends_the_server(model: Path) -> None:
    server = start(model, "--watchdog-timeout", "1.5")
    try:
        server.wait_ready()
        clients = Clients(server, 2)
        began = time.monotonic()
        server.child("faulty_scheduler").suspend()
        assert clients.wait() - began < 1.5 * 1.25 + HEARD_S
        assert clients.failed_with("has not answered for 1.5 s (--watchdog-timeout)", 500)
        server.wait_gone(5)
        assert server.process.returncode == 1 and server.leftovers() == []
    finally:
        server.stop()


@pytest.mark.long
@pytest.mark.parametrize("order", ["SIGTERM", "RAISE"])
def test_a_full_disk_for_logs_changes_nothing(model: Path, order: str) -> None:
    server = start(model, "--log-requests", "--decode-log-interval", "1", log="/dev/full")
    try:
        server.wait_ready()
        assert ask(server, "hello", max_new_tokens=20).json()["meta_info"]["completion_tokens"] == 20
        if order == "SIGTERM":
            server.process.terminate()
            server.wait_gone(5)
            assert server.process.returncode == 0
        else:
            clients = Clients(server, 2)
            began = time.monotonic()
            ask(server, order, max_new_tokens=5)
            assert clients.wait() - began < HEARD_S and clients.failed_with("as ordered", 500)
            server.wait_gone(5)
            assert server.process.returncode == 1
        assert server.leftovers() == []
    finally:
        server.stop()
