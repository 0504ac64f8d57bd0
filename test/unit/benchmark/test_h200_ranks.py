"""The script for several GPUs in its small form, with processes that talk through Gloo."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import all_reduce, tensor_parallel


def test_equal_shares_end_at_the_first_difference() -> None:
    assert tensor_parallel.equal_share([[1, 2, 3, 4]], [[1, 2, 9, 4]]) == 0.5
    assert tensor_parallel.equal_share([[1, 2], [3, 4]], [[1, 2], [3, 4]]) == 1.0


def test_tables_hold_what_was_measured() -> None:
    lines = [
        {"kind": "all_reduce", "ranks": 2, "bytes": 4096, "micros": {"nccl": 9.04, "once": 4.2}},
        {"kind": "all_reduce", "ranks": 2, "bytes": 1 << 23, "micros": {"nccl": 70.0}},
    ]
    assert all_reduce.table(lines)[2:] == ["| 4096 | 9.0 | 4.2 |", "| 8388608 | 70.0 |  |"]
    steps = [
        {"kind": "decode", "mode": "plain", "way": way, "batch": 1, "wall_step_s": seconds}
        for way, seconds in (("one", 0.004), ("one", 0.003), ("nccl", 0.002))
    ]
    assert tensor_parallel.step_table(steps, ("one", "nccl"))[2:] == ["| 1 | 3.00 | 2.00 |  |  |"]


@pytest.mark.long
def test_all_parts_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    assert tensor_parallel.main(["--device", "cpu", "--tiny", "--out", str(out)]) == 0
    kinds = {json.loads(line)["kind"] for line in out.read_text().splitlines()}
    assert kinds == {"start", "all_reduce", "same", "kill", "decode"}
    assert "all of it is right: links, sums, same, kill, steps" in capfd.readouterr().out
