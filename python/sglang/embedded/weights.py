"""GGUF tensors of a Llama-shaped model as Hugging Face tensors in bfloat16.

Two things differ between the formats. GGUF blocks are quantised: they are expanded to float32 and rounded
once. And llama.cpp rotates neighbouring pairs of a head's channels where Hugging Face's Llama rotates
channel ``i`` with channel ``i + head_dim / 2``: the rows of the q and k projections are stored permuted,
and are put back here.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from gguf import quants

from sglang.embedded.gguf_source import EmbeddedModelError
from sglang.embedded.metadata import GgufMetadata

_TOP_LEVEL: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}

_PER_LAYER: Final = {
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
}

ProgressFn = Callable[[int, int], None]
"""Called with (tensors done, tensors in all)."""


def convert_tensors(
    tensors: list[Any], metadata: GgufMetadata, progress: ProgressFn
) -> dict[str, torch.Tensor]:
    """Return every tensor of the model by its Hugging Face name, bfloat16, on the CPU.

    Args:
        tensors: ``GGUFReader.tensors``.
        metadata: gives the head counts and the number of layers.
        progress: told after each tensor.

    Raises:
        EmbeddedModelError: a tensor is missing, or one is not of this architecture; its name is given.
    """
    converted: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(tensors, start=1):
        name = hf_tensor_name(tensor.name)
        weight = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        if name.endswith("q_proj.weight"):
            weight = unpermute_rope_rows(weight, metadata.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weight = unpermute_rope_rows(weight, metadata.num_key_value_heads)
        converted[name] = weight.to(torch.bfloat16).contiguous()
        progress(done, len(tensors))
    _check_complete(converted, metadata.num_hidden_layers)
    return converted


def hf_tensor_name(gguf_name: str) -> str:
    """Translate a GGUF tensor name (``blk.3.attn_q.weight``) to the Hugging Face one.

    Raises:
        EmbeddedModelError: the name belongs to no tensor of a Llama model with a tied output layer.
    """
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    parts = gguf_name.split(".", 2)
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _PER_LAYER:
        return f"model.layers.{parts[1]}.{_PER_LAYER[parts[2]]}"
    raise EmbeddedModelError(
        f"The embedded model's GGUF file holds a tensor of no known meaning: {gguf_name}"
    )


def unpermute_rope_rows(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Undo llama.cpp's row order of a q or k projection.

    Stored row ``2 * i + half`` of a head is row ``half * (head_dim / 2) + i`` of the Hugging Face weight.

    Args:
        weight: [num_heads * head_dim, hidden], rows as in the GGUF file.
        num_heads: heads of this projection (for k: key-value heads).

    Returns:
        The same shape, rows in Hugging Face's order.
    """
    rows, hidden = weight.shape
    half_dim = rows // num_heads // 2
    return weight.view(num_heads, half_dim, 2, hidden).transpose(1, 2).reshape(rows, hidden)


def _check_complete(converted: dict[str, torch.Tensor], num_layers: int) -> None:
    expected = list(_TOP_LEVEL.values())
    expected += [f"model.layers.{i}.{suffix}" for i in range(num_layers) for suffix in _PER_LAYER.values()]
    missing = [name for name in expected if name not in converted]
    if missing:
        raise EmbeddedModelError(f"The embedded model's GGUF file lacks tensors: {', '.join(missing[:5])}")
