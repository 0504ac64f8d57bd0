"""The script that times loading, with small files: it compares every tensor itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.loading import load_speed


def test_small_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(load_speed, "EXPERT", {"up": (64, 48), "down": (96, 32)})
    monkeypatch.setattr(load_speed, "MATRIX", (64, 40))
    monkeypatch.setattr(load_speed, "EXPERTS_A_FILE", 4)
    flags = ["--device", "cpu", "--gb", "0.0003", "--threads", "1", "2", "--repeats", "1"]
    assert load_speed.main([*flags, "--folder", str(tmp_path)]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(r["ranks"], r["threads"]) for r in records] == [(1, 1), (1, 2), (8, 1), (8, 2)]
    assert not list(tmp_path.iterdir())
