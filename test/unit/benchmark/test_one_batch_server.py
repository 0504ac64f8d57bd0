"""bench_one_batch_server against a server that generates nothing, and both benchmarks on a tiny model.

Run alone: pytest test/unit/benchmark/test_one_batch_server.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm_thread import fake_server
from helpers.server import speculative_flags, write_tiny_pair
from helpers.tiny_tokenizer import write_byte_tokenizer

from benchmark.client_streams.fake_llm import Pace
from sglang.benchmark import offline_throughput, one_batch_server
from sglang.benchmark.one_batch_flags import parse
from sglang.benchmark.prompt_row import PromptRow
from sglang.srt.utils.flags import ServerArgsError

KEYS = {
    "run_name", "batch_size", "input_len", "output_len", "latency", "input_throughput", "output_throughput",
    "overall_throughput", "last_ttft", "last_gen_throughput", "acc_length", "total_output_tokens",
    "num_early_stopped", "steady_state_output_throughput", "steady_state_window_s", "cache_hit_rate",
}  # fmt: skip
OFFLINE_KEYS = {
    "backend", "successful_requests", "total_latency", "total_input_tokens", "total_output_tokens",
    "request_throughput", "input_throughput", "output_throughput", "total_throughput", "last_gen_throughput",
}  # fmt: skip


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("words", [[], ["--parallel-batch"]])
def test_a_batch_end_to_end(words: list[str], tmp_path: Path) -> None:
    file, folder = tmp_path / "result.jsonl", write_byte_tokenizer(tmp_path)
    with fake_server(Pace(0.003, 2)) as (url, fake):
        argv = ["--model", "None", "--base-url", url, "--local-tokenizer-path", str(folder)]
        argv += ["--batch-size", "1", "5", "--input-len", "6", "--output-len", "9", "--cache-hit-rate", "0.5"]
        assert one_batch_server.main([*argv, "--result-filename", str(file), *words]) == 0
    records = read(file)
    assert [record["batch_size"] for record in records] == [1, 5]
    for record in records:
        assert record.keys() == KEYS and record["run_name"] == "default"
        assert (record["input_len"], record["output_len"]) == (6, 9)
        assert record["total_output_tokens"] == 9 * record["batch_size"] and record["num_early_stopped"] == 0
        assert (record["acc_length"], record["last_gen_throughput"]) == (2.0, 123.0)
        assert record["cache_hit_rate"] == pytest.approx(2 / 6, abs=1e-3)
    assert fake.seen.flushes == 3  # a warm-up, and two cases
    sizes = {len(b["input_ids"]) for b in fake.seen.bodies if b["sampling_params"]["max_new_tokens"] == 1}
    assert sizes == ({3} if words else {1, 5})  # ids of a prompt, or prompts
    if not words:
        assert {len(ids) for body in fake.seen.bodies for ids in body["input_ids"]} == {3, 6}


def test_a_case_that_fails_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_byte_tokenizer(tmp_path)
    with fake_server(Pace(fail_every=1)) as (url, _):
        argv = ["--base-url", url, "--local-tokenizer-path", str(folder), "--batch-size", "2"]
        assert one_batch_server.main([*argv, "--result-filename", str(tmp_path / "no.jsonl")]) == 1
    assert "refused on purpose" in capsys.readouterr().err
    assert not (tmp_path / "no.jsonl").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--base-url", "http://x", "--tp", "2"], "leave it out with --base-url"),
        (["--base-url", "x"], "must begin with http"),
        (["--backend", "vllm"], "needs --base-url"),
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--cache-hit-rate", "2"], "must be from 0 to 1"),
        (["--dataset-name", "mmmu"], "only text is served"),
        (["--profile"], "sglang.bench_one_batch --profile"),
        (["--show-report"], "read --result-filename"),
    ],
)
def test_flags_that_are_not_taken(words: list[str], said: str) -> None:
    with pytest.raises(ServerArgsError, match=said):
        parse(words)


def test_the_servers_flags_are_left_for_it() -> None:
    flags, rest = parse(["--batch-size", "2", "3", "--model-path", "m", "--tp", "2", "--seed", "7"])
    assert (flags.batch_size, flags.seed, rest) == ((2, 3), 7, ["--model-path", "m", "--tp", "2"])
    assert parse(["--model", "None", "--base-url", "http://x"])[1] == []


def test_flags_of_the_offline_benchmark() -> None:
    flags, args = offline_throughput.parse(["--num-prompts", "3", "--model-path", "m", "--page-size", "4"])
    assert (flags.num_prompts, flags.dataset_name, args.model_path, args.page_size) == (3, "sharegpt", "m", 4)
    for words in (["--backend", "runtime"], ["--profile"], ["--extra-request-body", "[]"], ["--what", "1"]):
        with pytest.raises(ServerArgsError):
            offline_throughput.parse(words)


def test_figures_of_the_offline_benchmark() -> None:
    rows = [PromptRow("a", 3, 4), PromptRow("b", 5, 4)]
    figures = offline_throughput.OfflineFigures.of(rows, 8, 2.0, 1.5)
    assert (figures.request_throughput, figures.input_throughput, figures.output_throughput) == (
        1.0,
        4.0,
        4.0,
    )
    assert figures.total_throughput == 8.0 and figures.successful_requests == 2


@pytest.mark.long
def test_a_tiny_model_in_a_server_of_its_own_and_in_an_engine(tmp_path: Path) -> None:
    target, drafter = write_tiny_pair(tmp_path)
    served = ["--model-path", str(target), *speculative_flags(drafter)]
    file = tmp_path / "result.jsonl"
    argv = ["--batch-size", "3", "--input-len", "12", "--output-len", "20", "--result-filename", str(file)]
    assert one_batch_server.main([*argv, *served]) == 0
    (record,) = read(file)
    assert record["total_output_tokens"] == 60 and record["acc_length"] > 1 and record["cache_hit_rate"] == 0
    file = tmp_path / "offline.jsonl"
    argv = ["--dataset-name", "chat", "--num-prompts", "5", "--sharegpt-output-len", "8", "--result-filename"]
    assert offline_throughput.main([*argv, str(file), *served]) == 0
    (record,) = read(file)
    assert record.keys() == OFFLINE_KEYS and record["total_output_tokens"] == 40
