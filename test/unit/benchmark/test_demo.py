"""The demo and the toggle benchmark's runner against a server that generates nothing."""

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.demo.load import Arrival, TokenCounter
from benchmark.demo.monitor import IDLE, PLAIN, SPEC, Sample, take_sample
from benchmark.spec_toggle import servers
from benchmark.spec_toggle.accept_lengths import measure_domains
from benchmark.spec_toggle.prompts import Prompt
from benchmark.spec_toggle.records import RunRecord
from benchmark.spec_toggle.runner import Workload, run_table
from benchmark.spec_toggle.servers import Server, ServerError, running_server, wait_until_healthy

FAKE_SERVER = (sys.executable, str(Path(__file__).with_name("fake_server.py")))
PROMPTS = tuple(Prompt(f"p{index}", "ab"[index % 2], "text") for index in range(6))


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running_server("fake", ["--ignored", "1"], tmp_path_factory.mktemp("fake"), FAKE_SERVER) as server:
        wait_until_healthy(server, 30.0)
        yield server


def test_demo_writes_picture_and_samples(fake: Server, tmp_path: Path) -> None:
    out = tmp_path / "picture" / "demo.png"
    command = [sys.executable, str(servers.REPOSITORY / "benchmark" / "demo" / "demo.py")]
    command += ["--base-url", fake.base_url, "--out", str(out), "--plateaus", "1,8,1"]
    result = subprocess.run(
        [*command, "--seconds", "1.5", "--poll", "0.1"], capture_output=True, text=True, timeout=90
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert out.stat().st_size > 10_000
    samples = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert {(s["streams"], s["mode"]) for s in samples[5:]} >= {(1, SPEC), (8, PLAIN)}
    assert max(sample["running"] for sample in samples) == 8
    assert result.stdout.count("tok/s") == 3
    assert samples[-1]["switches"] >= 2


def test_runner_measures_every_server_at_every_point(fake: Server) -> None:
    work = Workload(PROMPTS, (1, 8), repeats=2, tokens=31, min_prompts=2, cold=True, timeout_s=30.0)
    done: list[RunRecord] = []
    asyncio.run(run_table([fake], work, freeze=False, done=done.append))
    assert [(record.streams, record.repeat) for record in done] == [(1, 0), (1, 1), (8, 0), (8, 1)]
    speculative, plain = done[0], done[2]
    assert speculative.prompt_ids == ("p0", "p1")
    assert speculative.spec_tokens / speculative.spec_steps == 3.0
    assert (speculative.total_tokens, plain.total_tokens) == (62, 248)
    assert plain.server_steps_plain > 8  # the last few streams of a wave speculate
    assert speculative.decode_rate > 0
    assert plain.decode_rate > 0


def test_accept_lengths_by_domain(fake: Server) -> None:
    measured = asyncio.run(measure_domains(fake.base_url, PROMPTS, {"max_new_tokens": 31}, concurrency=2))
    assert sorted(measured) == ["a", "b"]
    assert all(count.accept_length == 3.0 for counts in measured.values() for count in counts)
    assert len(measured["a"]) == 3


def test_frozen_server_uses_no_cpu_and_comes_back(fake: Server) -> None:
    fake.send_signal(signal.SIGSTOP)
    try:
        assert servers.idle_load([fake], 0.2) == {"fake": 0.0}
    finally:
        fake.send_signal(signal.SIGCONT)
    wait_until_healthy(fake, 5.0)


def test_stopping_a_server_leaves_no_process(tmp_path: Path) -> None:
    with running_server("short", [], tmp_path, FAKE_SERVER) as server:
        wait_until_healthy(server, 30.0)
    assert not psutil.pid_exists(server.process.pid)


def test_a_server_that_dies_is_reported_with_its_log(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "import sys; sys.exit('no such model')")
    begin = time.monotonic()
    with (
        running_server("dead", [], tmp_path, command) as server,
        pytest.raises(ServerError, match="no such model"),
    ):
        wait_until_healthy(server, 60.0)
    assert time.monotonic() - begin < 20


def test_token_counter_forgets() -> None:
    counter = TokenCounter(2.0, 1.0)
    counter.add(Arrival(0.0, 1, False))
    counter.add(Arrival(1.0, 3, True))
    counter.add(Arrival(1.5, 2, True))
    assert counter.rate(1.5) == 3.0
    assert counter.tokens_per_step(1.5) == 2.5
    assert counter.rate(2.5) == 2.5
    assert counter.tokens_per_step(9.0) is None


@pytest.mark.parametrize(
    ("plain", "spec", "draft_len", "mode"),
    [(0, 0, 3, IDLE), (5, 1, 3, PLAIN), (1, 5, 0, SPEC), (2, 2, 3, SPEC)],
)
def test_mode_of_a_sample(plain: int, spec: int, draft_len: int, mode: str) -> None:
    first: Sample = take_sample(0.0, 1, {"decode_steps": {"plain": 10, "spec": 10}}, 0.0, None, None)
    state = {"decode_steps": {"plain": 10 + plain, "spec": 10 + spec}, "spec_draft_len": draft_len}
    assert take_sample(0.3, 1, state, 9.0, 1.0, first).mode == mode


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
