"""The benchmarks of experts and of latent attention: they run without a GPU, and find out wrong results."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.attention import dsa_speed, mla_speed, window_speed
from benchmark.moe import moe_speed
from sgl_kernel.attention import DecodePlan
from sgl_kernel.attention.mla.indexing.plan import IndexPlan
from sgl_kernel.moe.weights import Format


def records(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


@pytest.mark.parametrize("form", [form.value for form in Format])
def test_experts(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.jsonl"
    moe_speed.main(["--tiny", "--tokens", "1", "3", "--format", form, "--out", str(out)])
    printed = records(capsys.readouterr().out)
    assert [line["tokens"] for line in printed] == [1, 3] and printed[0]["hit"] == 2
    assert len(records(out.read_text())) == 2


def test_wrong_experts_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_speed, "fused_experts", lambda x, *_, **__: torch.ones_like(x))
    with pytest.raises(AssertionError, match="relative error"):
        moe_speed.main(["--tiny", "--tokens", "2"])


def test_bytes_of_an_expert() -> None:
    """Kimi-K2.5 on one of 8 ranks: 3 * 7168 * 256 weights of 4 bits, and a bfloat16 for 32 of them."""
    kimi = moe_speed.MODELS["kimi"]
    layer = moe_speed.make_layer(Format.INT4, kimi, 8, torch.device("meta"))
    assert layer.bytes_per_expert == 3 * 7168 * 256 * 9 // 16


def test_latent_attention(capsys: pytest.CaptureFixture[str]) -> None:
    mla_speed.main(["--tiny", "--heads", "2", "--queries", "1", "3"])
    printed = records(capsys.readouterr().out)
    assert {(line["shape"], line["queries"]) for line in printed} == {
        (shape, queries) for shape in mla_speed.TINY for queries in (1, 3)
    }


def test_wrong_attention_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(q: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return q.new_zeros(*q.shape[:2], mla_speed.R)

    monkeypatch.setattr(mla_speed, "latent_attention", zeros)
    with pytest.raises(AssertionError):
        mla_speed.main(["--tiny", "--heads", "2"])


def test_sparse_attention(capsys: pytest.CaptureFixture[str]) -> None:
    dsa_speed.main(["--tiny", "--heads", "2", "--index-heads", "2", "--queries", "1"])
    assert [line["shape"] for line in records(capsys.readouterr().out)] == list(dsa_speed.TINY)


def test_a_wrong_choice_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def first_ones(q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, plan: IndexPlan) -> None:
        plan.chosen[1:] = torch.arange(1, plan.top_k + 1)

    monkeypatch.setattr(dsa_speed, "choose_places", first_ones)
    with pytest.raises(AssertionError):
        dsa_speed.main(["--tiny", "--heads", "2", "--index-heads", "2", "--check"])


@pytest.mark.long
def test_windows(capsys: pytest.CaptureFixture[str]) -> None:
    window_speed.main(["--tiny"])
    lines = records(capsys.readouterr().out)
    assert [line["part"] for line in lines] == ["decode"] * 8 + ["prefill"] * 4
    assert [line["window"] for line in lines] == [0, 128] * 6


@pytest.mark.parametrize("ignored", ["window", "sinks"])
def test_what_is_ignored_is_found_out(ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attend = window_speed.decode_attention

    def wrong(q: torch.Tensor, kv: torch.Tensor, plan: DecodePlan, sinks: torch.Tensor) -> torch.Tensor:
        if ignored == "window":
            return attend(q, kv, replace(plan, view=replace(plan.view, window=0)), sinks=sinks)
        return attend(q, kv, plan)

    monkeypatch.setattr(window_speed, "decode_attention", wrong)
    with pytest.raises(AssertionError):
        window_speed.main(["--tiny", "--check"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.parametrize("main", [moe_speed.main, mla_speed.main, dsa_speed.main, window_speed.main])
def test_no_gpu_is_said(main: Any) -> None:
    with pytest.raises(SystemExit, match="--tiny"):
        main([])
