"""The check of rules on a GPU, in its small form on the CPU. Run alone: pytest THIS_FILE -m long"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import rules_correctness
from sglang.srt.sampling import kernel_sampler

pytestmark = pytest.mark.long
FLAGS = ["--device", "cpu", "--tiny", "--shapes"]


@pytest.mark.parametrize("shape", rules_correctness.SHAPES)
def test_rules_are_right(shape: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert rules_correctness.main([*FLAGS, shape, "--parts"]) == 0
    assert "all of it is right" in capsys.readouterr().out


def test_what_rules_cost_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert rules_correctness.main(["--device", "cpu", "--tiny", "--shapes"]) == 0
    told = capsys.readouterr().out
    assert all(f"| 2 | {mode} | grammar, xgrammar |" in told for mode in ("plain", "spec"))


@pytest.mark.parametrize("rule", ["apply_masks", "apply_rules"])
def test_a_rule_that_is_not_applied_is_found_out(
    rule: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return logits

    monkeypatch.setattr(kernel_sampler, rule, nothing)
    assert rules_correctness.main([*FLAGS, "chain", "--parts"]) == 1
    assert "failed: chain" in capsys.readouterr().out
