"""bench_serving against a server that generates nothing. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from helpers.fake_llm_thread import fake_server
from helpers.tiny_tokenizer import write_byte_tokenizer

from benchmark.client_streams.fake_llm import FakeServer, Pace
from sglang.benchmark.backends import BACKENDS
from sglang.benchmark.dataset_flags import UNKNOWN_DATASETS
from sglang.benchmark.refused_flags import refused_flags
from sglang.benchmark.serving import default_file, main
from sglang.benchmark.serving_flags import parse
from sglang.srt.utils.flags import ServerArgsError

SPREADS = [f"{w}_{m}_ms" for m in ("e2e_latency", "ttft", "tpot", "itl")
           for w in ("mean", "median", "std", "p90", "p95", "p99")]  # fmt: skip
KEYS = {
    "tag", "backend", "dataset_name", "request_rate", "max_concurrency", "sharegpt_output_len",
    "random_input_len", "random_output_len", "random_range_ratio", "server_info", "duration", "completed",
    "total_input_tokens", "total_input_text_tokens", "total_input_vision_tokens", "total_output_tokens",
    "total_output_tokens_retokenized", "request_throughput", "input_throughput", "output_throughput",
    "total_throughput", *SPREADS, "concurrency", "accept_length", "max_output_tokens_per_s",
    "max_concurrent_requests",
}  # fmt: skip
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"}
LABELS = [
    "Backend", "Traffic request rate", "Max request concurrency", "Successful requests",
    "Benchmark duration (s)", "Total input tokens", "Total input text tokens", "Total generated tokens",
    "Total generated tokens (retokenized)", "Request throughput (req/s)", "Input token throughput (tok/s)",
    "Output token throughput (tok/s)", "Peak output token throughput (tok/s)", "Peak concurrent requests",
    "Total token throughput (tok/s)", "Concurrency", "Accept length",
    *(f"{w} {m} (ms)" for m in ("E2E Latency", "TTFT", "TPOT", "ITL")
      for w in ("Mean", "Median", "P90", "P95", "P99")),
    "Max ITL (ms)",
]  # fmt: skip
QUICK = ["--warmup-requests", "0", "--disable-tqdm", "--dataset-name", "chat", "--sharegpt-output-len", "7"]


def run(folder: Path, pace: Pace, words: Sequence[str], count: int = 4) -> tuple[dict[str, Any], FakeServer]:
    tokenizer, file = write_byte_tokenizer(folder), folder / "out.jsonl"
    with fake_server(pace) as (url, fake):
        argv = ["--base-url", url, "--tokenizer", str(tokenizer), "--output-file", str(file), *QUICK]
        assert main([*argv, "--num-prompts", str(count), "--output-details", *words]) == 0
    lines = file.read_text().splitlines()
    assert len(lines) == 1
    return json.loads(lines[0]), fake


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_end_to_end(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, fake = run(tmp_path, Pace(0.002, 3), ["--backend", backend, "--tag", "mine"])
    assert record.keys() == KEYS | DETAILS
    assert (record["completed"], record["total_output_tokens"], record["tag"]) == (4, 28, "mine")
    assert record["output_lens"] == [7] * 4 and record["errors"] == [""] * 4
    assert set(record["generated_texts"]) == {"".join(f"w{i} " for i in range(7))}
    assert record["total_output_tokens_retokenized"] == 4 * len(record["generated_texts"][0])
    assert record["accept_length"] == (3.0 if backend.startswith("sglang") else None)
    counted = not backend.startswith("openai")  # chunks say how many tokens they hold
    for gaps in record["itls"]:  # 3, 3 and 1 tokens: the first event's have no gap
        assert len(gaps) == (4 if counted else 2)
        assert not counted or gaps[0] == gaps[1] == gaps[2]
    printed = [row.partition(":")[0] for row in capsys.readouterr().out.splitlines() if ":" in row]
    assert printed == [x for x in LABELS if x != "Accept length" or backend.startswith("sglang")]
    body = fake.seen.bodies[0]
    assert ("ignore_eos" in (body | body.get("sampling_params", {}))) == counted


def test_events_that_hold_only_what_is_new(tmp_path: Path) -> None:
    record, _ = run(tmp_path, Pace(0.001, 2, incremental=True), [])
    assert set(record["generated_texts"]) == {"".join(f"w{i} " for i in range(7))}
    assert record["output_lens"] == [7] * 4


@pytest.mark.parametrize("backend", ["sglang", "vllm-chat"])
def test_without_a_stream_the_first_token_comes_with_the_last(backend: str, tmp_path: Path) -> None:
    record, fake = run(tmp_path, Pace(0.002), ["--backend", backend, "--disable-stream"])
    assert not fake.seen.bodies[0]["stream"] and record["completed"] == 4
    assert record["itls"] == [[]] * 4 and record["total_output_tokens"] == 28
    assert record["mean_ttft_ms"] == pytest.approx(record["mean_e2e_latency_ms"], rel=0.05)


def test_never_more_at_a_time_than_allowed(tmp_path: Path) -> None:
    record, fake = run(tmp_path, Pace(0.003), ["--max-concurrency", "3", "--request-rate", "500"], count=20)
    assert fake.seen.most_running <= 3 and record["max_concurrent_requests"] <= 3
    assert record["completed"] == 20 and record["concurrency"] <= 3.01


def test_many_streams_in_one_process(tmp_path: Path) -> None:
    record, fake = run(tmp_path, Pace(0.05), [], count=300)
    assert record["completed"] == 300 == record["max_concurrent_requests"]
    assert set(record["errors"]) == {""} and fake.seen.most_running > 250


@pytest.mark.parametrize("backend", ["sglang", "sglang-oai", "sglang-oai-chat"])
def test_failures_are_told_and_count_nowhere(
    backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pace = Pace(0.002, fail_every=4, break_every=3)
    record, _ = run(tmp_path, pace, ["--backend", backend, "--max-concurrency", "1"], count=12)
    assert record["completed"] == 6 and record["total_output_tokens"] == 42
    assert record["errors"].count("HTTP 400: refused on purpose") == 3
    told = capsys.readouterr().err
    assert "6 of 12 requests failed" in told and "3 x broken on purpose" in told
    assert told.count("refused on purpose") == 1


def test_nothing_but_failures_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--warmup-requests", "2"]):
        with pytest.raises(SystemExit) as ended:
            run(tmp_path, Pace(fail_every=1), words)
        assert ended.value.code == 1 and "refused on purpose" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_what_the_user_adds_goes_into_every_request(tmp_path: Path) -> None:
    extra = json.dumps({"sampling_params": {"top_k": 5}, "rid_prefix": "x"})
    words = ["--extra-request-body", extra, "--temperature", "0.5", "--flush-cache", "--warmup-requests", "1",
             "--cache-report", "--goodput", "ttft:60000", "e2el:0.001"]  # fmt: skip
    record, fake = run(tmp_path, Pace(0.001), words)
    assert fake.seen.flushes == 1 and len(fake.seen.bodies) == 5
    for body in fake.seen.bodies:
        assert body["rid_prefix"] == "x"
        assert (body["sampling_params"]["top_k"], body["sampling_params"]["temperature"]) == (5, 0.5)
    assert record["cache_report"]["total_cached_tokens"] == 8
    assert record["request_goodput"] == 0  # nothing ends within a microsecond


def test_prompts_of_token_ids(tmp_path: Path) -> None:
    words = ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1",
             "--random-input-len", "9"]  # fmt: skip
    record, fake = run(tmp_path, Pace(0.001), words)
    assert all(len(body["input_ids"]) == 9 for body in fake.seen.bodies)
    assert record["input_lens"] == [9] * 4


def test_a_server_without_a_known_tokenizer_counts_itself(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    with fake_server(Pace(0.001)) as (url, _):
        argv = ["--base-url", f"{url}/v1/", "--backend", "vllm-chat", "--output-file", str(file), *QUICK]
        assert main([*argv, "--num-prompts", "3"]) == 0
    record = json.loads(file.read_text())
    assert record["total_output_tokens_retokenized"] is None
    assert (record["total_input_tokens"], record["total_output_tokens"]) == (21, 21)


def test_defaults_are_those_of_upstream() -> None:
    flags = parse([])
    assert (flags.backend, flags.dataset_name, flags.num_prompts) == ("sglang", "sharegpt", 1000)
    assert (flags.url, flags.seed, flags.temperature, flags.top_p) == ("http://0.0.0.0:30000", 42, 0.0, 1.0)
    assert (flags.random_input_len, flags.random_output_len, flags.random_range_ratio) == (1024, 1024, 0.0)
    assert math.isinf(flags.request_rate) and flags.max_concurrency is None and flags.warmup_requests == 1
    assert parse(["--backend", "vllm"]).url == "http://0.0.0.0:8000"
    gsp = (flags.gsp_num_groups, flags.gsp_prompts_per_group, flags.gsp_system_prompt_len)
    assert (*gsp, flags.gsp_question_len, flags.gsp_output_len) == (64, 16, 2048, 128, 256)


def test_names_of_files() -> None:
    day = datetime(2026, 3, 9)
    assert default_file(parse(["--num-prompts", "5"]), day) == "sglang_0309_5_sharegpt.jsonl"
    words = ["--dataset-name", "random", "--random-input-len", "8", "--backend", "vllm"]
    assert default_file(parse(words), day) == "vllm_0309_1000_8_1024.jsonl"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--backend", "trt"], "there is no backend trt"),
        (["--backend", "openai"], "needs --base-url"),
        (["--base-url", "localhost:1"], "must begin with http"),
        (["--request-rate", "0"], "--request-rate must be more than 0"),
        (["--request-rate", "nan"], "--request-rate must be more than 0"),
        (["--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
        (["--warmup-requests", "-1"], "must not be negative"),
        (["--extra-request-body", "[1]"], "must be a JSON object"),
        (["--extra-request-body", "{"], "is not JSON"),
        (["--header", "nothing"], "--header must be Name=value"),
        (["--goodput", "itl:5"], "--goodput takes"),
        (["--goodput", "ttft:x"], "--goodput takes"),
        (["--tokenize-prompt"], "--tokenize-prompt needs --dataset-name random"),
        (["--sharegpt-output-len", "0"], "--sharegpt-output-len must be at least 1"),
        (["--num-promts", "3"], "did you mean --num-prompts"),
        (["--tag", ""], "--tag is empty"),
        *((["--dataset-name", name], f"there is no data set {name}") for name in UNKNOWN_DATASETS),
        *(([option], option) for option in refused_flags()),
    ],
)
def test_what_is_not_taken_is_said(words: list[str], said: str) -> None:
    with pytest.raises(ServerArgsError) as refusal:
        parse(words)
    assert said in str(refusal.value)


def test_no_server_and_no_data_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--port", "1", "--ready-check-timeout-sec", "1"], "no server at http://0.0.0.0:1"),
        (["--dataset-name", "sharegpt"], "give a file in ShareGPT's format"),
    ):
        with fake_server(Pace()) as (url, _), pytest.raises(SystemExit):
            where = [] if "--port" in words else ["--base-url", url]
            main([*where, "--tokenizer", str(write_byte_tokenizer(tmp_path)), *words])
        *before, last = capsys.readouterr().err.splitlines()
        assert said in last
        waits = [line.startswith("waiting up to 1 s for a server at http://0.0.0.0:1") for line in before]
        assert waits == [True] * ("--port" in words)  # a minute of silence would look like a hang


def test_it_needs_neither_torch_nor_the_server() -> None:
    script = (
        "import sys, sglang.bench_serving; print(*(m for m in sys.modules if m == 'torch'"
        " or m.startswith('sglang.srt.') and m.split('.')[2] not in ('utils', 'managers', 'sampling')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    plans = {"sglang.srt.model_executor", "sglang.srt.model_executor.step_plan"}  # plain data, in messages
    assert set(done.stdout.split()) <= plans


def test_a_server_that_does_not_count_cached_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--backend", "openai-chat", "--cache-report"]
    record, _ = run(tmp_path, Pace(0.001, usage=False), words)
    assert record["cache_report"]["total_cached_tokens"] is None
    assert record["cache_report"]["cache_hit_rate_pct"] is None and record["total_output_tokens"] == 28
    assert "not told by the server" in capsys.readouterr().out
