"""``bench_one_batch``: an executor driven by hand-made plans alone."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path

import pytest
from helpers.tiny_executor import draft_folder, target_folder
from helpers.tiny_tokenizer import write_byte_tokenizer

from sglang import bench_one_batch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200.shapes import write_shapes

UPSTREAM_KEYS = {
    "run_name", "batch_size", "input_len", "output_len", "prefill_latency", "prefill_throughput",
    "median_decode_latency", "median_decode_throughput", "total_latency", "overall_throughput",
}  # fmt: skip


def _model_flags(shape: tuple[int, int, int] | None = (3, 1, 4)) -> list[str]:
    flags = ["--model-path", str(target_folder()), "--max-total-tokens", "2048", "--context-length", "512"]
    if shape is None:
        return flags
    names = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")
    flags += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft_folder())]
    return flags + [word for name, n in zip(names, shape, strict=True) for word in (name, str(n))]


@pytest.mark.parametrize(
    "flags",
    [
        _model_flags(None),
        _model_flags(),
        [*_model_flags(), "--draft-len", "3"],
        [*_model_flags(), "--draft-len", "2", "--alternate"],
        [*_model_flags((2, 3, 7)), "--draft-len", "2", "--page-size", "16"],
    ],
)
def test_records(flags: list[str], tmp_path: Path) -> None:
    file = tmp_path / "result.jsonl"
    sizes = ["--batch-size", "1", "3", "--input-len", "9", "--output-len", "1", "12"]
    words = [*flags, *sizes, "--run-name", "tried", "--result-filename", str(file)]
    assert bench_one_batch.main(words) == 0
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(r["batch_size"], r["output_len"]) for r in records] == [(1, 1), (1, 12), (3, 1), (3, 12)]
    for record in records:
        assert record.keys() >= UPSTREAM_KEYS and record["run_name"] == "tried"
        assert record["overlap"] and record["prefill_device_s"] <= record["prefill_latency"]
        if record["output_len"] == 1:
            assert record["decode_steps"] == 0 and record["median_decode_throughput"] == 0
            continue
        assert 1 <= record["accept_length"] <= 4 and record["median_decode_latency"] > 0
        assert record["wall_step_s"] >= 0.9 * record["median_device_step_s"] > 0
        lens = {record["draft_len"], 0} if record["alternate"] else {record["draft_len"]}
        assert record["modes"].keys() == {f"spec(k={k})" if k else "plain" for k in lens}
        if lens == {0}:
            assert record["accept_length"] == 1
            assert record["decode_throughput"] == pytest.approx(record["batch_size"] / record["wall_step_s"])


def test_dummy_weights_need_no_more_than_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    folders = write_shapes(tmp_path, tiny=True)
    words = ["--model-path", str(folders.target), "--speculative-draft-model-path", str(folders.drafter)]
    words += ["--speculative-algorithm", "EAGLE3", "--load-format", "dummy", "--max-total-tokens", "500"]
    words += ["--context-length", "100", "--speculative-num-steps", "3", "--draft-len", "3"]
    file = tmp_path / "result.jsonl"
    words += ["--input-len", "8", "--output-len", "40", "--result-filename", str(file), "--batch-size", "2"]
    assert bench_one_batch.main(words) == 0
    record = json.loads(file.read_text())
    assert record["accept_length"] == pytest.approx(3, rel=0.02) and record["simulate_acc_len"] == "3"


def test_prompts_of_a_file(tmp_path: Path) -> None:
    prompts, file = tmp_path / "prompts.txt", tmp_path / "result.jsonl"
    prompts.write_text("one\n\nand another\n")
    tokenizer = ["--tokenizer-path", str(write_byte_tokenizer(tmp_path / "tokenizer"))]
    words = [*_model_flags(None), *tokenizer, "--prompt-filename", str(prompts)]
    assert bench_one_batch.main([*words, "--result-filename", str(file)]) == 0
    record = json.loads(file.read_text())
    assert (record["batch_size"], record["input_len"]) == (2, len("and another"))


@pytest.mark.parametrize("stage,traces", [("all", 2), ("prefill", 1), ("decode", 1)])
def test_profile(stage: str, traces: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_TORCH_PROFILER_DIR", str(tmp_path / "traces"))
    words = ["--input-len", "5", "--output-len", "12", "--draft-len", "3", "--result-filename", ""]
    words += ["--profile", "--profile-stage", stage, "--profile-filename-prefix", "p", "--profile-steps", "2"]
    assert bench_one_batch.main([*_model_flags(), *words]) == 0
    files = sorted((tmp_path / "traces").iterdir())
    stages = ["decode", "prefill"] if stage == "all" else [stage]
    assert [f.name for f in files] == [f"p_batch1_input5_output12_{s}.trace.json.gz" for s in stages]
    for file in files:
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert "aten::embedding" in names or "aten::index_select" in names  # of the executor's thread


def test_correctness_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_byte_tokenizer(tmp_path / "tokenizer")
    flags = [*_model_flags((2, 3, 7)), "--tokenizer-path", str(folder), "--dtype", "float64"]
    assert bench_one_batch.main([*flags, "--correctness-test", "--output-len", "20"]) == 0
    assert "3 way(s) of decoding gave the same text" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags,sizes",
    [([], (1, 8)), (["--cuda-graph-max-bs", "4"], None), (["--cuda-graph-bs", "2"], (2,))],
)
def test_graphs_for_what_is_timed(flags: list[str], sizes: tuple[int, ...] | None) -> None:
    words = [*_model_flags(), "--device", "cuda", "--batch-size", "8", "1", *flags]
    _, args = bench_one_batch.parse(words)
    assert (args.cuda_graph_bs, args.max_running_requests) == (sizes, 8)
    _, args = bench_one_batch.parse([*_model_flags(), "--device", "cuda", "--disable-cuda-graph"])
    assert args.cuda_graph_bs is None and args.disable_cuda_graph


@pytest.mark.parametrize(
    "flags,message",
    [
        ([*_model_flags(None), "--draft-len", "3"], "--draft-len 3 is more than --speculative-num-steps 0"),
        (["--model-path", "/nowhere"], "does not exist"),
        ([*_model_flags(), "--input-len", "9000"], "KV places"),
        ([*_model_flags(), "--input-len", "500"], "a context of 516 tokens; it is 512"),
        ([*_model_flags(), "--no-such-flag"], "--no-such-flag"),
        ([*_model_flags(), "--output-len", "8", "0"], "--output-len must be at least 1, got 0"),
        ([*_model_flags(), "--prompt-filename", "/nowhere"], "/nowhere can't be read"),
        ([*_model_flags(), "--prompt-filename", "/nowhere", "--input-len", "5"], "leave out"),
    ],
)
def test_errors_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_one_batch.main(flags)
    assert stopped.value.code == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
