"""The checks of small models on a GPU, in their small form on the CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import dense_models, latent_models
from benchmark.h200 import small_correctness as script
from benchmark.h200.executors import Records
from sglang.srt.layers.attention import mla_triton
from sglang.srt.models import dense

ARGS = argparse.Namespace(tiny=True, device="cpu")


QUICK = ("kimi-eagle3-mla-chain",)


@pytest.mark.parametrize(
    "models,name",
    [
        pytest.param(models, case.name, marks=() if case.name in QUICK else pytest.mark.long, id=case.name)
        for models in (latent_models, dense_models)
        for case in models.CASES
    ],
)
def test_a_case_is_right(models: ModuleType, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.run(models.CASES, "", ["--device", "cpu", "--tiny", "--cases", name]) == 0
    printed = capsys.readouterr().out
    assert "all of it is right" in printed
    assert all(f"kind tokens; case {name}; ok True; graphs True; mode {m}" in printed for m in
               ("plain", "spec", "alternate"))  # fmt: skip


def test_values_a_little_too_large_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = mla_triton.latent_values
    monkeypatch.setattr(mla_triton, "latent_values", lambda *args, **named: 1.5 * exact(*args, **named))
    out = Records(None, "cpu")
    setting = script.setting_of(latent_models.CASES[0], tmp_path, ARGS, out)
    assert not script.compare_logits(setting)
    [line] = out.lines
    assert line["error"] > 2 * line["cpu_bf16"]


def test_heads_in_the_wrong_order_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dimensions as the file has them, under a rope that takes them half a head apart."""
    monkeypatch.setattr(dense, "in_order_of_kernels", lambda source, config: source)
    out = Records(None, "cpu")
    [case] = (case for case in dense_models.CASES if case.name == "glm-4.5-nextn-chain")
    assert not script.compare_logits(script.setting_of(case, tmp_path, ARGS, out))
