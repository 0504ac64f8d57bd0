"""The check of latent attention on a GPU, in its small form on the CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import latent_correctness as script
from benchmark.h200.executors import Records
from benchmark.h200.latent_models import CASES
from sglang.srt.layers.attention import mla_triton

ARGS = argparse.Namespace(tiny=True, device="cpu")


def test_a_case_is_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["--device", "cpu", "--tiny", "--cases", "kimi-eagle3-mla-chain"]) == 0
    printed = capsys.readouterr().out
    assert "all of it is right" in printed
    assert all(f"kind tokens; case kimi-eagle3-mla-chain; ok True; graphs True; mode {m}" in printed for m in
               ("plain", "spec", "alternate"))  # fmt: skip


def test_values_a_little_too_large_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = mla_triton.latent_values
    monkeypatch.setattr(mla_triton, "latent_values", lambda *args, **named: 1.5 * exact(*args, **named))
    out = Records(None, "cpu")
    setting = script.setting_of(CASES[0], tmp_path, ARGS, out)
    assert not script.compare_logits(setting)
    [line] = out.lines
    assert line["error"] > 2 * line["cpu_bf16"]
