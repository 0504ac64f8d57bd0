"""The check of what rows tell on a GPU, in its small form on the CPU. Run alone: pytest THIS_FILE -m long"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import told
from sglang.srt.model_executor.step_trace import StepTrace

pytestmark = pytest.mark.long
FLAGS = ["--device", "cpu", "--tiny", "--cases"]


@pytest.mark.parametrize("name", told.NAMES)
def test_a_case_is_right(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert told.main([*FLAGS, name]) == 0
    assert "all of it is right" in capsys.readouterr().out


def test_logits_of_another_row_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    exact = StepTrace.lines
    monkeypatch.setattr(StepTrace, "lines", lambda trace, rows: exact(trace, rows).roll(1, 0))
    assert told.main([*FLAGS, "qwen3-eagle3-chain"]) == 1
