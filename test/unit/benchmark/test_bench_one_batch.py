"""``bench_one_batch``: an executor driven by hand-made plans alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_executor import draft_folder, target_folder
from helpers.tiny_tokenizer import write_byte_tokenizer

from sglang import bench_one_batch

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
        if record["output_len"] == 12:
            assert 1 <= record["accept_length"] <= 4 and record["median_decode_latency"] > 0


def test_correctness_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_byte_tokenizer(tmp_path / "tokenizer")
    flags = [*_model_flags((2, 3, 7)), "--tokenizer-path", str(folder), "--dtype", "float64"]
    assert bench_one_batch.main([*flags, "--correctness-test", "--output-len", "20"]) == 0
    assert "3 way(s) of decoding gave the same text" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags,message",
    [
        ([*_model_flags(None), "--draft-len", "3"], "--draft-len 3 is more than --speculative-num-steps 0"),
        (["--model-path", "/nowhere"], "does not exist"),
        ([*_model_flags(), "--input-len", "9000"], "KV places"),
        ([*_model_flags(), "--no-such-flag"], "--no-such-flag"),
    ],
)
def test_errors_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench_one_batch.main(flags)
    assert stopped.value.code == 1
    error = capsys.readouterr().err.strip()
    assert message in error and "\n" not in error
