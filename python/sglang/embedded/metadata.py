"""What the GGUF file says about the model, as plain data, and the Hugging Face config made from it."""

from dataclasses import dataclass
from typing import Any

from sglang.embedded.gguf_source import EmbeddedModelError


@dataclass(frozen=True, slots=True)
class GgufMetadata:
    """The metadata of a Llama-shaped GGUF file with a byte-level BPE tokenizer."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int  # tokens
    rope_theta: float
    rms_norm_eps: float
    tokens: list[str]  # [vocab_size], index = token id
    token_types: list[int]  # [vocab_size], 3 = special
    merges: list[str]  # "left right", best first
    unk_token_id: int
    bos_token_id: int
    eos_token_id: int
    pad_token_id: int
    chat_template: str


def read_metadata(reader: Any) -> GgufMetadata:
    """Collect the fields of a ``gguf.GGUFReader``.

    Raises:
        EmbeddedModelError: a field is missing, or the architecture or tokenizer is another one.
    """
    _require(reader, "general.architecture", "llama")
    _require(reader, "tokenizer.ggml.model", "gpt2")
    _require(reader, "tokenizer.ggml.pre", "smollm")
    return GgufMetadata(
        hidden_size=int(_field(reader, "llama.embedding_length")),
        num_hidden_layers=int(_field(reader, "llama.block_count")),
        num_attention_heads=int(_field(reader, "llama.attention.head_count")),
        num_key_value_heads=int(_field(reader, "llama.attention.head_count_kv")),
        head_dim=int(_field(reader, "llama.rope.dimension_count")),
        intermediate_size=int(_field(reader, "llama.feed_forward_length")),
        vocab_size=int(_field(reader, "llama.vocab_size")),
        max_position_embeddings=int(_field(reader, "llama.context_length")),
        rope_theta=float(_field(reader, "llama.rope.freq_base")),
        rms_norm_eps=_shortest_float32(_field(reader, "llama.attention.layer_norm_rms_epsilon")),
        tokens=list(_field(reader, "tokenizer.ggml.tokens")),
        token_types=[int(kind) for kind in _field(reader, "tokenizer.ggml.token_type")],
        merges=list(_field(reader, "tokenizer.ggml.merges")),
        unk_token_id=int(_field(reader, "tokenizer.ggml.unknown_token_id")),
        bos_token_id=int(_field(reader, "tokenizer.ggml.bos_token_id")),
        eos_token_id=int(_field(reader, "tokenizer.ggml.eos_token_id")),
        pad_token_id=int(_field(reader, "tokenizer.ggml.padding_token_id")),
        chat_template=str(_field(reader, "tokenizer.chat_template")),
    )


def model_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the contents of ``config.json``; the output layer is the embedding, so it is not stored."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata.hidden_size,
        "intermediate_size": metadata.intermediate_size,
        "num_hidden_layers": metadata.num_hidden_layers,
        "num_attention_heads": metadata.num_attention_heads,
        "num_key_value_heads": metadata.num_key_value_heads,
        "head_dim": metadata.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": metadata.rms_norm_eps,
        "rope_theta": metadata.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": metadata.max_position_embeddings,
        "vocab_size": metadata.vocab_size,
        "tie_word_embeddings": True,
        "bos_token_id": metadata.bos_token_id,
        "eos_token_id": metadata.eos_token_id,
        "pad_token_id": metadata.pad_token_id,
        "torch_dtype": "bfloat16",
    }


def generation_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the contents of ``generation_config.json``: generation ends at the turn's end token."""
    return {
        "bos_token_id": metadata.bos_token_id,
        "eos_token_id": metadata.eos_token_id,
        "pad_token_id": metadata.pad_token_id,
    }


def _field(reader: Any, name: str) -> Any:
    field = reader.get_field(name)
    if field is None:
        raise EmbeddedModelError(f"The embedded model's GGUF file lacks the field {name}")
    return field.contents()


def _require(reader: Any, name: str, wanted: str) -> None:
    found = _field(reader, name)
    if found != wanted:
        raise EmbeddedModelError(
            f"The embedded model's GGUF file has {name} = {found!r}, expected {wanted!r}"
        )


def _shortest_float32(value: float) -> float:
    """Return the shortest decimal that rounds to the same float32 (1e-05 for 9.999999747e-06)."""
    return float(f"{value:.6g}")
