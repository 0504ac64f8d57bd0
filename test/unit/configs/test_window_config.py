"""Sliding windows in config files, and where they are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import write_tiny_mistral
from helpers.tiny_moe import gpt_oss_config

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.configs.moe_config import read_moe
from sglang.srt.configs.window_config import read_windows


def windows(architecture: str, fields: dict[str, Any], context_len: int = 10_000) -> tuple[int | None, ...]:
    return read_windows(ConfigFields(fields, "config.json"), architecture, 4, context_len)


def test_mistral_has_one_in_every_layer() -> None:
    assert windows("MistralForCausalLM", {"sliding_window": 300}) == (300,) * 4
    assert windows("MistralForCausalLM", {"sliding_window": None}) == ()
    assert windows("MistralForCausalLM", {}) == (4096,) * 4
    assert windows("MistralForCausalLM", {}, context_len=4096) == ()


def test_gpt_oss_has_one_in_every_other_layer_or_as_named() -> None:
    assert windows("GptOssForCausalLM", {}) == (128, None, 128, None)
    kinds = ["full_attention", "full_attention", "full_attention", "sliding_attention"]
    assert windows("GptOssForCausalLM", {"sliding_window": 9, "layer_types": kinds}) == (None,) * 3 + (9,)
    assert windows("GptOssForCausalLM", {"layer_types": kinds[:3] + kinds[:1]}) == ()


def test_others_have_none() -> None:
    assert windows("Qwen2ForCausalLM", {"sliding_window": 300, "use_sliding_window": False}) == ()


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["full_attention"] * 3 + ["chunked"], "full", 3])
def test_kinds_of_layers_that_are_not_known(kinds: object) -> None:
    with pytest.raises(ModelConfigError, match="must name 4 layers, each one of sliding_attention, full_att"):
        windows("GptOssForCausalLM", {"layer_types": kinds})


def test_another_clamp_of_gpt_oss_is_refused() -> None:
    fields = ConfigFields(gpt_oss_config() | {"swiglu_limit": 5.0}, "config.json")
    with pytest.raises(ModelConfigError, match="swiglu_limit 5.0 is not supported"):
        read_moe(fields, "GptOssForCausalLM", 4)


def test_a_window_over_the_whole_context_is_none(tmp_path: Path) -> None:
    folder = write_tiny_mistral(tmp_path, sliding_window=40)
    assert ModelConfig.from_folder(folder, 40).windows == ()
    assert ModelConfig.from_folder(folder, 41).windows == (40,) * 4
