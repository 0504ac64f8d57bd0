"""The estimate for other cards: bytes against a model's own, bounds, and where it says that it is from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.estimate import rtx_pro_6000
from benchmark.estimate.assumptions import NCCL, PUSHED, RTX_PRO_6000, USUAL_SHARE
from benchmark.estimate.steps import Estimate, Measured, RankShape
from benchmark.h200.rank_model import Weights, load
from benchmark.h200.rank_shapes import shape_of
from benchmark.h200.shapes import write_folder

KIMI = RankShape.of(shape_of("kimi", tiny=False)["text_config"], 4.5)


@pytest.mark.parametrize("ranks", [1, 8])
def test_bytes_are_those_of_a_model(tmp_path: Path, ranks: int) -> None:
    """Which holds 4 bytes a number on a CPU, where the estimate counts 2."""
    config = shape_of("kimi", tiny=True)
    model = load(write_folder(tmp_path, config), 64, torch.device("cpu"), ranks)
    shape, weights = RankShape.of(config["text_config"], 32, ranks), Weights.of(model)
    assert shape.expert_bytes == weights.an_expert
    of_biases = 4 * shape.num_moe_layers * shape.num_experts
    assert 2 * (shape.every_step_bytes - of_biases) + of_biases == weights.every_step
    assert shape.token_bytes == model.kv_shape.bytes_per_place(torch.bfloat16)


def test_kimis_bytes() -> None:
    """Known from its files: 594 GB in all, 74 GB a rank and what every rank has; 70.3 KB of cache."""
    assert KIMI.weight_bytes == pytest.approx(75.5e9, rel=0.02)
    assert KIMI.token_bytes == 61 * 576 * 2
    assert KIMI.step_bytes(1, 0, 1) == pytest.approx(6.1e9, rel=0.03)
    assert KIMI.step_bytes(32, 0, 1) == pytest.approx(39.5e9, rel=0.03)


@given(st.integers(1, 256), st.sampled_from((1024, 16384)), st.floats(0.2, 1.0), st.floats(1.0, 4.0))
def test_rates(batch: int, context: int, share: float, accept_length: float) -> None:
    """A measured share of the limit bounds the estimate from both sides; more accepted tokens never harm."""
    reading_there = KIMI.step_bytes(batch, context, 1) / 4.3e12 * 1e3
    measured = Measured(61, 4.3e12, {(batch, context, 1): (reading_there / share, reading_there)})
    estimate = Estimate(KIMI, RTX_PRO_6000, PUSHED, measured)
    reading = KIMI.step_bytes(batch, context, 1) / RTX_PRO_6000.bandwidth
    stack = estimate.stack(batch, context, 1)
    assert stack.high == pytest.approx(reading / share)
    assert stack.low == pytest.approx(reading + reading_there / 1e3 * (1 / share - 1))
    not_measured = estimate.stack(batch, context, 4)
    assert not_measured.low == not_measured.high == KIMI.step_bytes(batch, context, 4) / 1.79e12 / USUAL_SHARE
    plain, spec = estimate.plain_rate(batch, context), estimate.spec_rate(batch, context, accept_length)
    assert plain.low <= plain.high and spec.low <= estimate.spec_rate(batch, context, 4.0).low
    slower = Estimate(KIMI, RTX_PRO_6000, NCCL, measured)
    assert slower.plain_rate(batch, context).high < plain.high


@given(st.floats(1, 1e8))
def test_sums(num_bytes: float) -> None:
    once = PUSHED.start_s + 7 * num_bytes / PUSHED.bandwidth
    assert PUSHED.sum_s(num_bytes, 8) <= once
    assert PUSHED.sum_s(num_bytes, 8) >= 1.75 * num_bytes / PUSHED.bandwidth
    assert PUSHED.sum_s(num_bytes, 8) < NCCL.sum_s(num_bytes, 8)


def test_where_plain_wins_is_where_its_rate_is_higher() -> None:
    estimate = Estimate(KIMI, RTX_PRO_6000, NCCL, None)
    wins, largest = estimate.plain_wins(1024, 2.3, 256)
    found = {batch for span in wins for batch in span}
    assert found and largest > max(found) - 1
    for batch in range(1, largest + 1):
        plain, spec = estimate.plain_rate(batch, 1024), estimate.spec_rate(batch, 1024, 2.3)
        assert (plain.low >= spec.low) == (batch in found)
    assert estimate.fits(largest, 1024, True) and not estimate.fits(largest + 1, 1024, True)


def test_the_report_says_what_it_is_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rtx_pro_6000.main([]) == 0
    assert "No step times of an H200" in capsys.readouterr().out
    lines = [{"kind": "stack", "model": "kimi", "layers": 40, "bandwidth": 4.2e12}]
    lines += [
        {
            "kind": "step",
            "model": "kimi",
            "batch": 1,
            "context": 1024,
            "queries": q,
            "ms": 3.0,
            "limit_ms": 1.5,
        }
        for q in (1, 4)
    ]
    stack, document = tmp_path / "stack.jsonl", tmp_path / "doc.md"
    stack.write_text("\n".join(map(json.dumps, lines)))
    document.write_text("a\n<!-- begin estimate -->\n<!-- end estimate -->\nb\n")
    assert rtx_pro_6000.main(["--stack", str(stack), "--links", "nccl", "--write", str(document)]) == 0
    text = document.read_text()
    assert "only 40 of 61 layers; copying at 4.20 TB/s" in text and "Sums: NCCL over PCIe" in text
    assert "No step times" not in text and text.startswith("a\n") and text.endswith("b\n")
