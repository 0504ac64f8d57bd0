"""The demo and the toggle benchmark's runner against a server that generates nothing."""

import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.demo.load import Arrival, TokenCounter
from benchmark.demo.monitor import IDLE, Sample, take_sample
from benchmark.spec_toggle import servers
from benchmark.spec_toggle.accept_lengths import compare, measure_domains, read_expected
from benchmark.spec_toggle.prompts import EXPECTED_ACCEPT, Prompt
from benchmark.spec_toggle.protocols import Wish
from benchmark.spec_toggle.rates import SpecCount
from benchmark.spec_toggle.records import MODES, PLAIN, PLAIN_WITH_DRAFTER, SPEC, TOGGLE, RunRecord
from benchmark.spec_toggle.runner import Workload, modes_of, require_mode, run_round
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


def test_round_measures_every_mode_at_every_point(tmp_path: Path) -> None:
    work = Workload(PROMPTS, (1, 8), num_prompts=4, min_prompts=2, tokens=31, timeout_s=30.0)
    done: list[RunRecord] = []
    with (
        running_server("plain", ["--no-drafter"], tmp_path, FAKE_SERVER) as plain,
        running_server("drafting", [], tmp_path, FAKE_SERVER) as drafting,
    ):
        wait_until_healthy(plain, 30.0)
        wait_until_healthy(drafting, 30.0)
        modes = modes_of(plain, drafting, threshold=4)
        for index in range(2):
            asyncio.run(run_round(index, modes, work, random.Random(index), done.append))
    points = [(index, streams) for index in (0, 1) for streams in (1, 8) for _ in MODES]
    assert [(record.round, record.streams) for record in done] == points
    assert all({r.mode for r in done[i : i + 4]} == set(MODES) for i in range(0, len(done), 4))
    assert len({tuple(record.mode for record in done[i : i + 4]) for i in range(0, len(done), 4)}) > 1
    runs = {(record.mode, record.streams): record for record in done if record.round == 0}
    assert runs[SPEC, 1].prompt_ids == ("p0", "p1")
    assert runs[SPEC, 1].spec_tokens / runs[SPEC, 1].spec_steps == 3.0
    assert (runs[SPEC, 1].total_tokens, runs[PLAIN, 8].total_tokens) == (62, 248)
    assert runs[PLAIN, 1].steps_plain == runs[PLAIN_WITH_DRAFTER, 1].steps_plain == 60
    assert (runs[TOGGLE, 1].steps_plain, runs[TOGGLE, 1].steps_spec) == (0, 20)
    assert runs[TOGGLE, 8].steps_plain > 8  # the last few streams of a wave may speculate
    assert all(record.decode_rate > 0 for record in done if record.streams == 1)


def test_a_mode_that_did_not_run_as_named_is_refused() -> None:
    allowed = {TOGGLE: (3, 2), SPEC: (0, 2), PLAIN: (3, 0), PLAIN_WITH_DRAFTER: (3, 0)}
    for mode, (plain, spec) in allowed.items():
        require_mode(mode, plain, spec)
    for mode, wrong in ((PLAIN, "1 spec"), (PLAIN_WITH_DRAFTER, "1 spec"), (SPEC, "1 plain")):
        with pytest.raises(ServerError, match=wrong):
            require_mode(mode, 1, 1)


def test_few_streams_get_more_tokens_and_rounds_other_prompts() -> None:
    work = Workload(PROMPTS, (1, 64), num_prompts=2, min_prompts=2, tokens=None, timeout_s=1.0)
    assert [work.tokens_at(streams) for streams in (1, 2, 8, 64)] == [22, 41, 28, 16]
    assert [[prompt.id for prompt in work.prompts_of(index)] for index in (0, 1)] == [
        ["p0", "p1"],
        ["p4", "p5"],
    ]
    assert [len(work.waves(PROMPTS, streams)) for streams in (1, 2, 8)] == [2, 1, 1]


def test_accept_lengths_by_domain(fake: Server) -> None:
    measured = asyncio.run(measure_domains(fake.base_url, PROMPTS, Wish(31), concurrency=2))
    assert sorted(measured) == ["a", "b"]
    assert all(count.accept_length == 3.0 for counts in measured.values() for count in counts)
    assert len(measured["a"]) == 3


def test_the_expectations_of_the_shipped_drafter_are_found() -> None:
    greedy = read_expected(EXPECTED_ACCEPT, 3, 0.0)
    assert (greedy["all"], greedy["tool"]) == (2.958, 3.195)
    assert read_expected(EXPECTED_ACCEPT, 3, 1.0)["all"] == 2.085
    assert read_expected(EXPECTED_ACCEPT, 2, 0.0) == read_expected(EXPECTED_ACCEPT, 3, 0.7) == {}
    # The tokens measured weigh the domains: of all prompts, they give what the file has for all.
    table = json.loads(EXPECTED_ACCEPT.read_text())["greedy"]
    counts = {
        name: [SpecCount(row["tokens"], 9)] for name, row in table.items() if name not in ("all", "chat")
    }
    rows = {row.domain: row for row in compare(counts, greedy)}
    assert rows["all"].expected == pytest.approx(2.958, abs=2e-3)
    assert rows["chat"].expected == pytest.approx(2.608, abs=2e-3)
    assert (rows["tool"].expected, rows["chat"].steps, rows["all"].sequences) == (3.195, 18, 7)
    assert compare(counts, {"tool": 3.0})[-1].expected is None


def test_frozen_server_does_nothing_and_comes_back(fake: Server) -> None:
    fake.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{fake.base_url}/health", timeout=0.3)
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
