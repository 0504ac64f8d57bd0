"""Tiny random models in Hugging Face folders, for tests.

All of them have a vocabulary of 256, so that ids can be bytes. Weights are drawn from ``seed`` and
nothing else. The embedding is large against what the layers add, so the next token depends mostly on
the last one; ``write_tiny_eagle3`` makes a drafter that copies that part of the target, and so agrees
with it often but not always: accept counts vary between 0 and the number of drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

BASE_CONFIG: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


def write_tiny_llama(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """Llama with llama3 rope scaling (sequences beyond 64 use all three of its bands)."""
    fields = BASE_CONFIG | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 16,
        "rope_scaling": dict(LLAMA3_ROPE),
        "attention_bias": False,
    }
    return _write_target(folder, seed, fields | config)


def write_tiny_mistral(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """Mistral of after v0.1: no sliding window."""
    fields = BASE_CONFIG | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 24,
        "sliding_window": None,
    }
    return _write_target(folder, seed, fields | config)


def write_tiny_qwen2(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """Qwen2: biases on q, k and v, tied embeddings, no explicit head_dim."""
    fields = BASE_CONFIG | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
    }
    return _write_target(folder, seed, fields | config)


def write_tiny_qwen3(folder: str | Path, seed: int = 0, **config: Any) -> Path:
    """Qwen3: q and k norms, head_dim 32 (not hidden / heads)."""
    fields = BASE_CONFIG | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "head_dim": 32,
        "attention_bias": False,
        "use_sliding_window": False,
    }
    return _write_target(folder, seed, fields | config)


def write_tiny_eagle3(
    folder: str | Path,
    target_folder: str | Path,
    seed: int = 0,
    draft_vocab: int | None = 192,
    *,
    layer_prefix: str = "midlayer.",
    model_prefix: str = "",
    with_embedding: bool = False,
    **config: Any,
) -> Path:
    """Drafter for a model written by this module.

    ``draft_vocab`` ids of the target's are drawn at random; None means the whole vocabulary and the
    target's own lm_head. The file names start with ``model_prefix + layer_prefix``.
    """
    target = json.loads((Path(target_folder) / "config.json").read_text())
    target = target.get("text_config", target)
    fields = {
        name: target[name]
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "rms_norm_eps",
            "max_position_embeddings",
        )
    }
    fields |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,  # 4 * 16 = hidden: the values can carry the whole embedding
        "head_dim": 16,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": target["hidden_size"],
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    fields |= config
    tensors = _eagle3_tensors(fields, read_target(Path(target_folder)), seed)
    names = {name: model_prefix + name for name in tensors if name not in ("d2t", "t2d")}
    renamed = {names.get(n, n).replace("midlayer.", layer_prefix): t for n, t in tensors.items()}
    if with_embedding:
        renamed[model_prefix + "embed_tokens.weight"] = read_target(Path(target_folder))[
            "model.embed_tokens.weight"
        ].clone()
    return write_folder(folder, fields, renamed)


def write_folder(folder: str | Path, config: dict[str, Any], tensors: Tensors, num_shards: int = 1) -> Path:
    """A Hugging Face folder: config.json and one safetensors file, or an index and several."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    tensors = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        file = f"model-{i + 1:05d}-of-{num_shards:05d}.safetensors"
        part = names[i::num_shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


def put_head(tensors: Tensors, layer: int, draw: Draw) -> None:
    """What a draft head (MTP) has beside its layer ``layer``. It guesses from the last token's embedding, as
    its target mostly does, and with the target's last norm."""
    hidden = len(tensors["model.norm.weight"])
    prefix = f"model.layers.{layer}."
    tensors[f"{prefix}enorm.weight"] = draw.norm(hidden)
    tensors[f"{prefix}hnorm.weight"] = draw.norm(hidden)
    joined = torch.cat((torch.eye(hidden), draw.linear(hidden, hidden, 0.2)), 1)
    tensors[f"{prefix}eh_proj.weight"] = joined
    tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()


def _write_target(folder: str | Path, seed: int, fields: dict[str, Any]) -> Path:
    num_shards = fields.pop("num_shards", 1)
    return write_folder(folder, fields, target_tensors(fields, seed), num_shards)


def read_target(folder: Path) -> Tensors:
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    # A language model inside a larger one has the same names behind a prefix.
    return {name.removeprefix("language_model."): tensor for name, tensor in tensors.items()}


class Draw:
    """Random matrices that keep the size of what goes through them, times ``gain``."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, std: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * std

    def linear(self, out: int, inp: int, gain: float = 1.0) -> torch.Tensor:
        return self.normal(out, inp, std=gain * inp**-0.5)

    def norm(self, size: int) -> torch.Tensor:
        return 1.0 + self.normal(size, std=0.1)


def _sizes(fields: dict[str, Any]) -> tuple[int, int, int, int]:
    """hidden, intermediate, q features, k (or v) features."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    head_dim = fields.get("head_dim") or hidden // heads
    return hidden, fields["intermediate_size"], heads * head_dim, fields["num_key_value_heads"] * head_dim


def target_tensors(fields: dict[str, Any], seed: int) -> Tensors:
    draw = Draw(seed)
    hidden, inter, q_size, kv_size = _sizes(fields)
    qwen2 = fields["model_type"] == "qwen2"
    qk_norm = fields["model_type"] in ("qwen3", "qwen3_moe") or fields.get("use_qk_norm")
    vocab = fields["vocab_size"]
    tensors = {
        "model.embed_tokens.weight": draw.normal(vocab, hidden),
        "model.norm.weight": draw.norm(hidden),
    }
    if fields["tie_word_embeddings"]:
        # Random signs, or else every token would predict itself; smaller, for logits as below.
        signs = 2.0 * torch.randint(0, 2, (hidden,), generator=draw.generator) - 1.0
        tensors["model.norm.weight"] *= 0.3 * signs
    else:
        tensors["lm_head.weight"] = draw.linear(vocab, hidden, 3.0)
    for i in range(fields["num_hidden_layers"]):
        p = f"model.layers.{i}."
        for name, out in (("q", q_size), ("k", kv_size), ("v", kv_size)):
            tensors[f"{p}self_attn.{name}_proj.weight"] = draw.linear(
                out, hidden, 1.0 if name == "v" else 1.6
            )
            if qwen2 or fields.get("attention_bias"):
                tensors[f"{p}self_attn.{name}_proj.bias"] = draw.normal(out, std=0.3)
        tensors[f"{p}self_attn.o_proj.weight"] = draw.linear(hidden, q_size, 0.25)
        if fields.get("attention_bias"):
            tensors[f"{p}self_attn.o_proj.bias"] = draw.normal(hidden, std=0.1)
        if qk_norm:
            head_dim = fields["head_dim"]
            tensors[f"{p}self_attn.q_norm.weight"] = draw.norm(head_dim)
            tensors[f"{p}self_attn.k_norm.weight"] = draw.norm(head_dim)
        tensors[f"{p}mlp.gate_proj.weight"] = draw.linear(inter, hidden)
        tensors[f"{p}mlp.up_proj.weight"] = draw.linear(inter, hidden)
        tensors[f"{p}mlp.down_proj.weight"] = draw.linear(hidden, inter, 0.2)
        tensors[f"{p}input_layernorm.weight"] = draw.norm(hidden)
        tensors[f"{p}post_attention_layernorm.weight"] = draw.norm(hidden)
    return tensors


def _eagle3_tensors(fields: dict[str, Any], target: Tensors, seed: int) -> Tensors:
    """A drafter that predicts from the last token's embedding, as its target mostly does.

    The layer attends to its own place (q and k are the same map, which a rope of distance 0 leaves
    alone), adds that place's embedding to the residual stream and takes away the hidden state that
    came in, so a chain of drafts stays as good as its first. lm_head and last norm are the target's.
    """
    draw = Draw(seed + 1_000_003)
    hidden, inter, q_size, kv_size = _sizes(fields)
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    target_hidden = fields["target_hidden_size"]
    head_dim = kv_size // kv_heads
    # [kv_heads, head_dim, 2 * hidden]: keys of one head look at the embedding, hardly at the feature
    key = torch.cat((draw.linear(kv_size, hidden, 2.2), draw.linear(kv_size, hidden, 0.2)), 1)
    key = key.view(kv_heads, head_dim, 2 * hidden)
    value = torch.linalg.qr(draw.normal(max(kv_size, hidden), max(kv_size, hidden))).Q[:kv_size, :hidden]
    back = value.T.reshape(hidden, kv_heads, 1, head_dim) * (
        kv_heads / heads
    )  # [hidden, kv_heads, 1, head_dim]
    fc = draw.linear(hidden, 3 * target_hidden, 0.1)
    fc[:, -target_hidden:] += torch.eye(hidden, target_hidden)
    p = "midlayer."
    tensors = {
        "fc.weight": fc,
        f"{p}self_attn.q_proj.weight": key.repeat_interleave(heads // kv_heads, 0).reshape(
            q_size, 2 * hidden
        ),
        f"{p}self_attn.k_proj.weight": key.reshape(kv_size, 2 * hidden),
        f"{p}self_attn.v_proj.weight": torch.cat((value, -value), 1),
        f"{p}self_attn.o_proj.weight": back.expand(hidden, kv_heads, heads // kv_heads, head_dim)
        .reshape(hidden, q_size)
        .clone(),
        f"{p}mlp.gate_proj.weight": draw.linear(inter, hidden),
        f"{p}mlp.up_proj.weight": draw.linear(inter, hidden),
        f"{p}mlp.down_proj.weight": draw.linear(hidden, inter, 0.1),
        f"{p}input_layernorm.weight": draw.norm(hidden),
        f"{p}hidden_norm.weight": draw.norm(hidden),
        f"{p}post_attention_layernorm.weight": draw.norm(hidden),
        "norm.weight": draw.norm(hidden) if target_hidden != hidden else target["model.norm.weight"].clone(),
    }
    draft_vocab, vocab = fields["draft_vocab_size"], fields["vocab_size"]
    if draft_vocab is not None:
        head = target.get("lm_head.weight", target["model.embed_tokens.weight"])
        ids = torch.randperm(vocab, generator=draw.generator)[:draft_vocab].sort().values
        in_draft = torch.zeros(vocab, dtype=torch.bool)
        in_draft[ids] = True
        tensors["lm_head.weight"] = (
            head[ids].clone() if target_hidden == hidden else draw.linear(draft_vocab, hidden)
        )
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = in_draft
    return tensors
