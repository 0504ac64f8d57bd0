"""Config reading: old and new fields, defaults, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_models import LLAMA3_ROPE, write_tiny_eagle3, write_tiny_llama, write_tiny_qwen2

from sglang.srt.configs.model_config import ModelConfig, ModelConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


def read(folder: Path, context_length: int | None = None, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA | fields))
    return ModelConfig.from_folder(folder, context_length)


def test_old_and_new_rope_fields_are_one(tmp_path: Path) -> None:
    old = read(tmp_path, rope_theta=5e5, rope_scaling=LLAMA3_ROPE)
    older = {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_type"} | {"type": "llama3"}
    assert read(tmp_path, rope_theta=5e5, rope_scaling=older).rope == old.rope
    assert read(tmp_path, rope_parameters=LLAMA3_ROPE | {"rope_theta": 5e5}).rope == old.rope
    assert old.rope.kind == "llama3" and old.rope.theta == 5e5
    assert old.rope.original_max_positions == 64
    assert read(tmp_path, rope_scaling=None).rope.kind == "default"


def test_defaults(tmp_path: Path) -> None:
    config = read(tmp_path)
    assert (config.head_dim, config.num_kv_heads, config.context_len) == (16, 4, 512)
    assert not config.tie_word_embeddings and not config.attention_bias
    assert config.eos_ids == () and config.bos_id is None and config.dtype == "float32"
    assert read(tmp_path, head_dim=32).head_dim == 32
    assert read(tmp_path, torch_dtype="bfloat16").dtype == "bfloat16"
    assert read(tmp_path, dtype="float16", torch_dtype="bfloat16").dtype == "float16"


def test_end_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20, "do_sample": True})
    )
    config = read(tmp_path, eos_token_id=2, bos_token_id=1)
    assert config.eos_ids == (2, 7) and config.bos_id == 1
    assert config.sampling_defaults == {"temperature": 0.6, "top_k": 20.0}


def test_top_k_0_of_a_checkpoint_means_all_of_them(tmp_path: Path) -> None:
    """transformers writes it so; as a default it would have every request refused."""
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 0, "top_p": 0.9}))
    assert read(tmp_path).sampling_defaults == {"top_p": 0.9}


def test_context_length(tmp_path: Path) -> None:
    assert read(tmp_path, context_length=100).context_len == 100
    linear = {"type": "linear", "factor": 2.0}
    assert read(tmp_path, rope_scaling=linear).context_len == 1024
    assert read(tmp_path, rope_scaling=LLAMA3_ROPE).context_len == 512
    with pytest.raises(ModelConfigError, match="1000 is more than the model's 512"):
        read(tmp_path, context_length=1000)


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported .*LlamaForCausalLM"),
        ({"architectures": []}, "lacks 'architectures'"),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, "--speculative-draft-model-path"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "64"}, "'hidden_size' must be a positive integer"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, "lacks 'original_max_position_embeddings'"),
        ({"rope_scaling": [1]}, "'rope_scaling' must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_key_value_heads": 3}, "4 heads can't share 3 KV heads"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'.*gptq, awq"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"eos_token_id": "x"}, "'eos_token_id' must hold integers"),
    ],
)
def test_what_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message) as caught:
        read(tmp_path, **fields)
    assert "\n" not in str(caught.value)


def test_broken_folders(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="nowhere does not exist"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    with pytest.raises(ModelConfigError, match="has no config.json"):
        ModelConfig.from_folder(tmp_path)
    file = tmp_path / "config.json"
    file.write_text('{"architectures": ["Llama')
    with pytest.raises(ModelConfigError, match=r"config.json is not valid JSON \(truncated\?\)"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelConfigError, match="is a file: give the folder"):
        ModelConfig.from_folder(file)
    file.write_text("[]")
    with pytest.raises(ModelConfigError, match="holds a JSON list"):
        ModelConfig.from_folder(tmp_path)


def test_tiny_models_are_read(tmp_path: Path) -> None:
    llama = ModelConfig.from_folder(write_tiny_llama(tmp_path / "llama"))
    assert llama.architecture == "LlamaForCausalLM" and llama.eos_ids == (2,)
    assert ModelConfig.from_folder(write_tiny_qwen2(tmp_path / "qwen2")).tie_word_embeddings


class TestDraft:
    def read(self, folder: Path, draft_vocab: int | None = 192, **fields: Any) -> ModelConfig:
        write_tiny_llama(folder / "target")
        write_tiny_eagle3(folder / "draft", folder / "target", draft_vocab=draft_vocab, **fields)
        return ModelConfig.from_draft_folder(folder / "draft", 300)

    def test_fields(self, tmp_path: Path) -> None:
        config = self.read(tmp_path)
        assert config.draft is not None and config.context_len == 300
        assert config.draft.draft_vocab_size == 192 and config.draft.num_aux == 3
        assert config.draft.aux_layers(30) == (2, 15, 27)

    def test_explicit_layers_name_outputs(self, tmp_path: Path) -> None:
        config = self.read(tmp_path, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 14, 26]})
        assert config.draft is not None
        assert config.draft.aux_layers(30) == (2, 15, 27)
        with pytest.raises(ModelConfigError, match="of a target with 20 layers"):
            config.draft.aux_layers(20)

    def test_safeailab_name(self, tmp_path: Path) -> None:
        config = self.read(tmp_path, architectures=["LlamaForCausalLM"])
        assert config.architecture == "LlamaForCausalLMEagle3"

    @pytest.mark.parametrize(
        "fields,message",
        [
            ({"num_hidden_layers": 2}, "1 layer here, this one has 2"),
            ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
            ({"architectures": ["Qwen2ForCausalLM"]}, "supported: LlamaForCausalLMEagle3"),
        ],
    )
    def test_what_is_refused(self, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
        with pytest.raises(ModelConfigError, match=message):
            self.read(tmp_path, **fields)
