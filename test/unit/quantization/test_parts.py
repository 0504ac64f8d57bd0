"""A rank's part of a packed weight is the part of the whole, and no more of the file is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.quantise import FORMATS, write_quantised
from helpers.tiny_models import write_folder, write_tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.quant_config import read_quant
from sglang.srt.distributed.shares import Span
from sglang.srt.model_loader.checkpoint import open_source
from sglang.srt.model_loader.weight_source import Part, WeightError, WeightSource

DOWN = "model.layers.0.mlp.down_proj"
SHAPE = (64, 192)
UNITS = {  # rows and columns that are never cut through
    "int4": (1, 32), "int4-zeros": (8, 32), "int4-rows": (1, 8), "int8-packed": (4, 64), "int8": (1, 1),
    "ct-fp8-rows": (1, 1), "ct-fp8-one": (1, 1), "ct-fp8-block": (32, 64), "ct-nvfp4": (1, 16),
    "ct-mxfp4": (1, 32), "gptq": (8, 32), "gptq-shuffled": (8, 192), "gptq-v2": (8, 32), "gptq-8": (4, 32),
    "awq": (8, 32), "fp8-block": (32, 48), "fp8": (1, 1), "fbgemm": (1, 1), "modelopt-fp8": (1, 1),
    "nvfp4": (1, 16),
}  # fmt: skip


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], WeightSource]:
    made: dict[str, Path] = {}

    def source(name: str) -> WeightSource:
        if name not in made:
            root = tmp_path_factory.mktemp(name)
            dense = write_tiny_llama(root / "source", num_hidden_layers=1, intermediate_size=SHAPE[1])
            made[name] = write_quantised(dense, root, FORMATS[name])[0]
        quant = ModelConfig.from_folder(made[name]).quant
        return open_source(made[name], "auto", torch.float32, "cpu", quant)

    return source


def test_every_format_is_here() -> None:
    assert set(UNITS) == set(FORMATS)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(UNITS)), dim=st.integers(0, 1))
def test_a_part_is_that_of_the_whole(
    opened: Callable[[str], WeightSource], data: st.DataObject, name: str, dim: int
) -> None:
    begin, end = sorted(
        data.draw(st.lists(st.integers(0, SHAPE[dim]), min_size=2, max_size=2, unique=True), "span")
    )
    unit = UNITS[name][dim]
    if data.draw(st.booleans(), "aligned"):
        begin, end = begin // unit * unit, -(-end // unit) * unit
    part = Part(dim, Span(begin, min(end, SHAPE[dim])))
    source = opened(name)
    whole = part.of(source.take(f"{DOWN}.weight", SHAPE))
    assert torch.equal(source.take(f"{DOWN}.weight", SHAPE, part=part), whole)
    if part.span.begin % unit or (part.span.end % unit and part.span.end != SHAPE[dim]):
        with pytest.raises(
            WeightError, match="cut through what the checkpoint packs together: use a smaller"
        ):
            source.take_packed(f"{DOWN}.weight", SHAPE, part)
        return
    packed = source.take_packed(f"{DOWN}.weight", SHAPE, part)
    assert packed is not None and packed.shape == part.shape(SHAPE)
    assert torch.equal(packed.dequantise(torch.float32), whole)
    all_of_it = source.take_packed(f"{DOWN}.weight", SHAPE)
    assert all_of_it is not None
    assert packed.packed_bytes <= all_of_it.packed_bytes * part.span.size / SHAPE[dim] + 4 * sum(SHAPE)


@pytest.mark.parametrize("dim, begin, end", [(0, 1, 2), (1, 32, 64), (1, 16, 64), (2, 4, 9)])
def test_blocks_of_all_experts(tmp_path: Path, dim: int, begin: int, end: int) -> None:
    """GPT-OSS's: the file holds them the other way round."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, 96, 12)
    blocks = torch.randint(0, 256, (2, 12, 3, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(120, 130, (2, 12, 3), generator=generator).to(torch.uint8)
    config = {"architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}}
    write_folder(tmp_path, config, {"x_blocks": blocks, "x_scales": scales})
    source = open_source(tmp_path, "auto", torch.float32, "cpu", read_quant(tmp_path))
    whole, part = source.take("x", shape), Part(dim, Span(begin, end))
    assert whole.unique().numel() > 20
    assert torch.equal(source.take("x", shape, part=part), part.of(whole))
