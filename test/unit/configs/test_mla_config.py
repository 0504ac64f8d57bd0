"""Latent attention as config.json says it, and a language model's fields inside a larger one's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_mla import (
    write_tiny_deepseek_v2,
    write_tiny_deepseek_v3,
    write_tiny_deepseek_v32,
    write_tiny_glm5,
    write_tiny_kimi_k25,
)

from sglang.srt.configs.draft_config import DraftConfig
from sglang.srt.configs.model_config import ModelConfig, ModelConfigError


def change(folder: Path, **fields: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder


def index_layers(folder: Path, **fields: Any) -> tuple[int, ...]:
    mla = ModelConfig.from_folder(change(folder, **fields)).mla
    assert mla is not None and mla.index is not None
    return mla.index.layers


def test_kimis_yarn_makes_scores_larger(tmp_path: Path) -> None:
    """The real model's numbers: 192 dimensions of a key, factor 64."""
    yarn = {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096}
    yarn |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    sizes = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    folder = change(write_tiny_deepseek_v3(tmp_path), rope_scaling=yarn, **sizes)
    mla = ModelConfig.from_folder(folder).mla
    assert mla is not None and mla.softmax_scale * 192**0.5 == pytest.approx(2.0047, abs=1e-4)
    plain = ModelConfig.from_folder(change(folder, rope_scaling=None)).mla
    assert plain is not None and plain.softmax_scale == pytest.approx(192**-0.5)


def test_which_layers_have_indexers(tmp_path: Path) -> None:
    folder = write_tiny_glm5(tmp_path)
    assert index_layers(folder) == (0, 1, 3)
    assert index_layers(folder, indexer_types=None, index_topk_pattern="FSSF") == (0, 3)
    assert index_layers(folder, index_topk_pattern=None) == (0, 1, 2, 3)
    # As GLM-5.2 says it: full where max(i - offset + 1, 0) % freq == 0.
    assert index_layers(folder, index_topk_freq=2, index_skip_topk_offset=2) == (0, 1, 3)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"indexer_types": ["shared", "full", "full", "full"]}, "first layer must have an indexer"),
        ({"indexer_types": ["full", "full"]}, "the indexers of 4 layers must each be full or shared"),
        ({"indexer_types": None, "index_topk_pattern": "FSXF"}, "must each be full or shared"),
        ({"index_head_dim": 8}, "'index_head_dim' 8 is less than 'qk_rope_head_dim' 16"),
        ({"q_lora_rank": None}, "'q_lora_rank' is needed"),
        ({"qk_rope_head_dim": 15}, "'qk_rope_head_dim' must be even, not 15"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ({"index_topk": 0}, "'index_topk' must be a positive integer"),
    ],
)
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    folder = change(write_tiny_glm5(tmp_path), **fields)
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_folder(folder)


def test_indexers_turn_as_their_family_does(tmp_path: Path) -> None:
    for writer, expected in ((write_tiny_deepseek_v32, False), (write_tiny_glm5, True)):
        mla = ModelConfig.from_folder(writer(tmp_path / writer.__name__)).mla
        assert mla is not None and mla.index is not None and mla.index.interleaved is expected


def test_v2_lite_has_no_latent_of_queries(tmp_path: Path) -> None:
    folder = write_tiny_deepseek_v2(tmp_path, q_lora_rank=None)
    config = ModelConfig.from_folder(folder)
    assert config.mla is not None and config.mla.q_lora_rank is None and config.head_dim == 36


def test_a_language_model_inside_a_larger_one(tmp_path: Path) -> None:
    folder = write_tiny_kimi_k25(tmp_path)
    config = ModelConfig.from_folder(folder)
    assert config.architecture == "KimiK25ForConditionalGeneration" and config.model_type == "kimi_k2"
    assert config.num_layers == 4 and config.eos_ids == (2,) and config.moe is not None
    whole = json.loads((folder / "config.json").read_text())
    del whole["text_config"]["eos_token_id"]
    change(folder, text_config=whole["text_config"], eos_token_id=[7, 9])
    assert replace(config, eos_ids=(7, 9)) == ModelConfig.from_folder(folder)
    change(folder, text_config=None)
    with pytest.raises(ModelConfigError, match="lacks 'text_config', where KimiK25For"):
        ModelConfig.from_folder(folder)


def test_layers_that_drafters_read_of_such_targets() -> None:
    """What SGLang does for DeepSeek's kind: ids are outputs if the first is 1, else inputs."""
    draft = DraftConfig(None, 64, 3, (1, 29, 57), False, False, False, False)
    assert draft.aux_layers(61, target_has_mla=True) == (2, 30, 58) == draft.aux_layers(61)
    inputs = replace(draft, aux_layer_ids=(2, 30, 58))
    assert inputs.aux_layers(61, target_has_mla=True) == (2, 30, 58)
    assert inputs.aux_layers(61) == (3, 31, 59)
    assert replace(draft, aux_layer_ids=None).aux_layers(61, target_has_mla=True) == (2, 30, 58)
