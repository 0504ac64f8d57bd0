"""One rank's stack in its small form on a CPU; the bytes of its limit; how the real shapes are read."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import rank_stack
from benchmark.h200.rank_model import OwnPart, Weights, load
from benchmark.h200.rank_shapes import MODELS, shape_of
from benchmark.h200.shapes import write_folder
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed.tensor_parallel import TensorParallel

CPU = torch.device("cpu")


def test_a_tiny_stack(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.jsonl"
    assert rank_stack.main(["--tiny", "--device", "cpu", "--model", "kimi", "--out", str(file)]) == 0
    lines: list[dict[str, Any]] = [json.loads(line) for line in file.read_text().splitlines()]
    stack, steps = lines[0], [line for line in lines if line["kind"] == "step"]
    assert stack["layers"] == 5 and stack["weights"]["num_moe_layers"] == 4
    assert {(s["batch"], s["context"], s["queries"]) for s in steps} == {
        (b, 40, q) for b in (1, 3) for q in (1, 4)
    }
    weights = Weights(**stack["weights"])
    for step in steps:
        tokens = step["batch"] * step["queries"]
        assert 2 <= step["experts_hit"] <= min(2 * tokens, 16) and step["ms"] > 0
        read = weights.every_step + 4 * step["experts_hit"] * weights.an_expert
        assert step["weight_bytes"] == pytest.approx(read, rel=0.02)
        assert step["cache_bytes"] == step["batch"] * 40 * 5 * (64 + 16) * 4
        limit = (step["weight_bytes"] + step["cache_bytes"]) / stack["bandwidth"] * 1e3
        assert step["limit_ms"] == pytest.approx(limit, abs=1e-3)
    printed = capsys.readouterr().out
    assert rank_stack.main(["--table", str(file)]) == 0
    assert capsys.readouterr().out in printed


def test_weights_of_a_rank_are_an_eighth(tmp_path: Path) -> None:
    """Of the experts; what is read in every step is all the rest but the embedding."""
    folder = write_folder(tmp_path, shape_of("glm5-dense", tiny=True))
    whole, part = (Weights.of(load(folder, 64, CPU, ranks)) for ranks in (1, 8))
    assert part.an_expert == whole.an_expert / 8 == 3 * 256 * 32 * 4  # dequantised on a CPU
    embedding = 256 * 256 * 4
    assert whole.total == whole.every_step + 2 * 16 * whole.an_expert + embedding
    assert part.total == part.every_step + 2 * 16 * part.an_expert + embedding / 8


@pytest.mark.parametrize("model", MODELS)
def test_the_real_shapes(tmp_path: Path, model: str) -> None:
    config = ModelConfig.from_folder(write_folder(tmp_path, shape_of(model, tiny=False)), 65536)
    assert config.moe is not None and config.mla is not None and config.quant is not None
    assert (config.mla.index is not None) == (model == "glm5")
    assert config.quant.method == ("compressed-tensors" if model == "kimi" else "modelopt")
    layer = "language_model.model.layers.5" if model == "kimi" else "model.layers.5"
    assert not config.quant.ignores(f"{layer}.mlp.experts.0.up_proj")
    assert config.quant.ignores(f"{layer}.mlp.shared_experts.up_proj")
    assert config.quant.ignores(f"{layer}.self_attn.o_proj")
    assert config.quant.ignores(f"{layer.replace('5', '0')}.mlp.up_proj")


def test_own_part() -> None:
    tp = TensorParallel(0, 4, OwnPart(4, "cpu"))
    summing, joining, x = tp.summing, tp.joining(7), torch.tensor([[1.0, 2.0]])
    assert summing is not None and joining is not None
    assert torch.equal(summing(x.clone()), x) and torch.equal(summing(x.clone(), x + 1), 2 * x + 1)
    assert torch.equal(joining(x), torch.tensor([[1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0]]))
