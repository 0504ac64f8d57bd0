"""Quantised checkpoints equal the unquantised ones they stand for, bit for bit.

Run alone: ``pytest test/unit/quantization``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.quantise import FORMATS, write_quantised
from helpers.run_model import Driver, load_target
from helpers.tiny_models import write_tiny_llama, write_tiny_qwen2, write_tiny_qwen3

WRITERS = (write_tiny_llama, write_tiny_qwen2, write_tiny_qwen3)


@pytest.mark.parametrize("name", FORMATS)
def test_model_equals_the_dequantised_one(tmp_path: Path, name: str) -> None:
    """Prefill, a chunk, decode and several queries a row; families take turns."""
    writer = WRITERS[list(FORMATS).index(name) % len(WRITERS)]
    source = writer(tmp_path / "source", seed=3, num_hidden_layers=2)
    quantised, plain = write_quantised(source, tmp_path, FORMATS[name])
    ids = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(2))
    for dtype in (torch.float32, torch.float64):
        logits = []
        for folder in (quantised, plain):
            driver = Driver(load_target(folder, dtype), 16, dtype)
            parts = [driver.prefill(ids[:20]), driver.prefill(ids[20:33])]
            parts += [driver.decode(ids[33:34]), driver.decode(ids[34:40])]
            logits.append(torch.cat(parts))
        assert torch.equal(*logits)
    assert not torch.equal(logits[0], Driver(load_target(source, dtype), 16, dtype).prefill(ids))
