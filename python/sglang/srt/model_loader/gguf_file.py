"""A GGUF file of a Llama- or Qwen-shaped model, its tensors under Hugging Face's names.

Blocks are dequantised to float32 as they are read. llama.cpp turns neighbouring pairs of a head's
channels where Hugging Face's Llama turns channel ``i`` with ``i + head_dim / 2``: its files hold the
rows of q and k permuted. Its Qwen files don't.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from sglang.srt.model_loader.weight_source import WeightError

_TOP: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "model.rotary_emb.inv_freq",  # computed from the config, as the buffer of that name
}
_PARTS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_PERMUTED: Final = {"llama": True, "qwen2": False, "qwen3": False}  # architecture -> rows of q and k


class GgufFile:
    def __init__(self, path: Path) -> None:
        try:  # only here: it takes long, and few models are read from such files
            import gguf

            from sglang.embedded.weights import unpermute_rope_rows
        except ImportError as error:
            raise WeightError(f"{path}: reading it needs the package gguf: pip install gguf") from error
        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, OSError, KeyError, IndexError) as error:
            raise WeightError(f"{path} is truncated or not a GGUF file: {error}") from error
        self._dequantise, self._unpermute = gguf.quants.dequantize, unpermute_rope_rows
        self._path = path
        self._architecture = str(_field(reader, path, "general.architecture"))
        if self._architecture not in _PERMUTED:
            raise WeightError(
                f"{path}: GGUF files of architecture {self._architecture!r} are not supported"
                f" (supported: {', '.join(_PERMUTED)})"
            )
        self._heads = int(_field(reader, path, f"{self._architecture}.attention.head_count"))
        self._kv_heads = int(_field(reader, path, f"{self._architecture}.attention.head_count_kv"))
        self._tensors: dict[str, Any] = {_hf_name(tensor.name): tensor for tensor in reader.tensors}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def dtype(self, name: str) -> torch.dtype:
        return torch.float32  # as it is read

    def num_bytes(self, name: str) -> int:
        return int(self._tensors[name].n_bytes)

    def close(self) -> None:
        self._tensors.clear()

    def tensor(self, name: str) -> torch.Tensor:
        stored = self._tensors[name]
        try:
            values = self._dequantise(stored.data, stored.tensor_type)
        except RuntimeError as error:
            kind = stored.tensor_type.name
            raise WeightError(
                f"{self._path}: tensor {stored.name} is of type {kind}, which can't be read"
            ) from error
        tensor = torch.from_numpy(values.copy()).view(self.shape(name))
        heads = {"self_attn.q_proj": self._heads, "self_attn.k_proj": self._kv_heads}
        for part, num_heads in heads.items():
            if _PERMUTED[self._architecture] and f".{part}." in name:
                rows = tensor.reshape(tensor.shape[0], -1)
                tensor = self._unpermute(rows, num_heads).view_as(tensor)
        return tensor


def _field(reader: Any, path: Path, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise WeightError(f"{path} lacks the field {name}")
    return field.contents()


def _hf_name(name: str) -> str:
    """A name that is not known stays, and is an unexpected tensor in the end."""
    if name in _TOP:
        return _TOP[name]
    pieces = name.split(".")  # blk.3.attn_q.weight
    if len(pieces) == 4 and pieces[0] == "blk" and pieces[2] in _PARTS:
        return f"model.layers.{pieces[1]}.{_PARTS[pieces[2]]}.{pieces[3]}"
    return name
