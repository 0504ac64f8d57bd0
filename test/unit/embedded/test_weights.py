"""The converted weights are transformers' own reading of the GGUF file, rounded to bfloat16."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig
from unit.embedded.conftest import Conversion

from sglang.embedded.gguf_source import EmbeddedModelError
from sglang.embedded.weights import hf_tensor_name, unpermute_rope_rows


def test_every_tensor_equals_transformers(
    conversion: Conversion, reference_weights: dict[str, torch.Tensor]
) -> None:
    ours = load_file(conversion.folder / "model.safetensors")
    assert set(ours) == set(reference_weights)
    different = [
        name for name, tensor in ours.items() if not torch.equal(tensor, reference_weights[name].bfloat16())
    ]
    assert different == []
    assert len(ours) == 2 + 30 * 9


def test_config_is_read_by_transformers(conversion: Conversion) -> None:
    config = AutoConfig.from_pretrained(conversion.folder)
    assert config.architectures == ["LlamaForCausalLM"]
    sizes = (config.hidden_size, config.num_hidden_layers, config.intermediate_size, config.vocab_size)
    assert sizes == (576, 30, 1536, 49152)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (9, 3, 64)
    assert config.rope_parameters["rope_theta"] == 100000.0
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-5, 8192)
    assert config.tie_word_embeddings is True


def test_unpermute_inverts_llama_cpp_order() -> None:
    num_heads, head_dim, hidden = 3, 8, 5
    weight = torch.arange(num_heads * head_dim * hidden, dtype=torch.float32).view(-1, hidden)
    permuted = weight.view(num_heads, 2, head_dim // 2, hidden).transpose(1, 2).reshape(-1, hidden)
    assert not torch.equal(permuted, weight)
    assert torch.equal(unpermute_rope_rows(permuted, num_heads), weight)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "rope_freqs.weight", "blk.x.attn_q.weight"])
def test_unknown_tensor_is_named(name: str) -> None:
    with pytest.raises(EmbeddedModelError, match=name):
        hf_tensor_name(name)
