"""What a Hugging Face folder says about its model (config.json, generation_config.json)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Final

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError, read_json_object
from sglang.srt.configs.draft_config import DRAFT_ARCHITECTURES, DraftConfig, draft_fields, read_draft
from sglang.srt.configs.mla_config import MLA_ARCHITECTURES, MLAConfig, read_mla
from sglang.srt.configs.moe_config import MoEConfig, read_moe
from sglang.srt.configs.nested_config import language_fields
from sglang.srt.configs.quant_config import QuantConfig, read_quant
from sglang.srt.configs.rope_config import RopeConfig, read_rope
from sglang.srt.configs.window_config import read_windows

__all__ = ["ModelConfig", "ModelConfigError", "TARGET_ARCHITECTURES", "DRAFT_ARCHITECTURES"]

TARGET_ARCHITECTURES: Final = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Glm4MoeForCausalLM",
    "GptOssForCausalLM",
    *MLA_ARCHITECTURES,
)

_PARTIAL_ROPE: Final[Mapping[str, float]] = MappingProxyType({"Glm4MoeForCausalLM": 0.5})
"""Families that turn a part of a head: which, where their files don't say."""

_DTYPES: Final = ("float64", "float32", "bfloat16", "float16")
_SAMPLING_DEFAULTS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    path: str
    architecture: str
    model_type: str  # empty where the file doesn't say
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int  # query heads
    num_kv_heads: int
    head_dim: int  # of a query
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool  # as in the file; Qwen2 has biases on q, k and v without saying so
    qk_norm: bool  # as in the file, where only GLM's says so; Qwen3 has it all the same
    mlp_bias: bool
    dtype: str  # of the checkpoint: "float32", "bfloat16", …
    context_len: int  # most tokens of one request
    eos_ids: tuple[int, ...]
    bos_id: int | None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)  # of generation_config.json
    num_nextn_layers: int = 0  # draft heads stored as layers after the last one
    moe: MoEConfig | None = None  # of a mixture of experts
    windows: tuple[int | None, ...] = ()  # places that a layer's queries see; None, or (): all of them
    mla: MLAConfig | None = None  # of a model with latent attention
    draft: DraftConfig | None = None  # of a draft model
    quant: QuantConfig | None = None  # of a quantised checkpoint

    @classmethod
    def from_folder(cls, path: str | Path, context_length: int | None = None) -> ModelConfig:
        """Read the target model in a folder. ``context_length`` is the user's; None: the model's.

        Raises:
            ModelConfigError: no such folder, a file that is broken, or a model that isn't supported.
        """
        fields = _read_folder(Path(path))
        architecture = _architecture(fields)
        if draft_fields(fields, architecture)[1] in DRAFT_ARCHITECTURES:
            raise ModelConfigError(
                f"{path} holds a draft model ({architecture}): give it as --speculative-draft-model-path"
            )
        _check_known(fields, architecture, TARGET_ARCHITECTURES)
        fields = language_fields(fields, architecture)
        return _build(cls, Path(path), fields, architecture, context_length, None)

    @classmethod
    def from_draft_folder(cls, path: str | Path, context_length: int) -> ModelConfig:
        """Read the draft model in a folder. It runs at the target's ``context_length``.

        Raises:
            ModelConfigError: as ``from_folder``.
        """
        fields = _read_folder(Path(path))
        fields, architecture = draft_fields(fields, _architecture(fields))
        _check_known(fields, architecture, DRAFT_ARCHITECTURES)
        draft = read_draft(fields)
        return _build(cls, Path(path), fields, architecture, context_length, draft)


def has_drafter_alone(path: str | Path) -> bool:
    """Whether a folder holds an EAGLE-3 drafter.

    Raises:
        ModelConfigError: no such folder, or a file that is broken.
    """
    fields = _read_folder(Path(path))
    return draft_fields(fields, _architecture(fields))[1] in DRAFT_ARCHITECTURES


def _read_folder(path: Path) -> ConfigFields:
    if not path.is_dir():
        problem = "is a file" if path.exists() else "does not exist"
        raise ModelConfigError(
            f"model path {path} {problem}: give the folder of a model on this machine (nothing is downloaded;"
            " `hf download NAME --local-dir FOLDER` does that)"
        )
    file = path / "config.json"
    if not file.is_file():
        raise ModelConfigError(f"model path {path} has no config.json")
    return ConfigFields(read_json_object(file), str(file))


def _architecture(fields: ConfigFields) -> str:
    names = fields.raw.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelConfigError(f"{fields.where} lacks 'architectures' (a list whose first entry is used)")
    return names[0]


def _check_known(fields: ConfigFields, architecture: str, known: tuple[str, ...]) -> None:
    if architecture not in known:
        raise ModelConfigError(
            f"{fields.where}: architecture {architecture!r} is not supported (supported: {', '.join(known)})"
        )


def _build(
    cls: type[ModelConfig],
    path: Path,
    fields: ConfigFields,
    architecture: str,
    context_length: int | None,
    draft: DraftConfig | None,
) -> ModelConfig:
    _refuse_unsupported(fields)
    generation = _read_generation(path)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(f"{fields.where}: {num_heads} heads can't share {num_kv_heads} KV heads")
    head_dim = fields.integer("head_dim", max(hidden_size // num_heads, 1))
    max_positions = fields.integer("max_position_embeddings", 2048)
    rope = read_rope(fields, max_positions, _PARTIAL_ROPE.get(architecture))
    num_layers = fields.integer("num_hidden_layers")
    mla = read_mla(fields, architecture, rope, num_layers)
    if mla is None and rope.turned(head_dim) % 2:
        raise ModelConfigError(f"{fields.where}: an odd number of a head's {head_dim} dimensions is turned")
    own_context = _context_len(fields, rope, max_positions)
    if draft is None:
        _check_context(fields, context_length, own_context)
    context_len = own_context if context_length is None else context_length
    eos_ids = fields.integers("eos_token_id") + generation.integers("eos_token_id")
    bos_ids = fields.integers("bos_token_id")
    return cls(
        path=str(path),
        architecture=architecture,
        model_type=fields.text("model_type", ""),
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim if mla is None else mla.qk_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        qk_norm=fields.flag("use_qk_norm"),
        mlp_bias=fields.flag("mlp_bias"),
        dtype=_dtype(fields),
        context_len=context_len,
        eos_ids=tuple(dict.fromkeys(eos_ids)),
        bos_id=bos_ids[0] if bos_ids else None,
        sampling_defaults=_sampling_defaults(generation),
        num_nextn_layers=fields.count("num_nextn_predict_layers", fields.count("num_mtp_layers", 0)),
        moe=read_moe(fields, architecture, num_layers),
        windows=read_windows(fields, architecture, num_layers, context_len),
        mla=mla,
        draft=draft,
        quant=read_quant(path),
    )


def _refuse_unsupported(fields: ConfigFields) -> None:
    if (activation := fields.text("hidden_act", "silu")) != "silu":
        raise ModelConfigError(
            f"{fields.where}: hidden_act {activation!r} is not supported (supported: silu)"
        )
    if fields.flag("use_sliding_window"):
        raise ModelConfigError(f"{fields.where}: use_sliding_window is not supported")


def _read_generation(path: Path) -> ConfigFields:
    file = path / "generation_config.json"
    return ConfigFields(read_json_object(file) if file.is_file() else {}, str(file))


def _sampling_defaults(generation: ConfigFields) -> dict[str, float]:
    given = {name: generation.number(name) for name in _SAMPLING_DEFAULTS if generation.has(name)}
    if given.get("top_k") == 0:  # transformers' way to say: all
        del given["top_k"]
    return given


def _context_len(fields: ConfigFields, rope: RopeConfig, max_positions: int) -> int:
    """A scaled rope reaches further than max_position_embeddings, unless the file says from where it
    was scaled: then max_position_embeddings is the scaled length already (SGLang's rule)."""
    scaling = fields.child("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    if rope.kind in ("default", "llama3") or scaling.has("original_max_position_embeddings"):
        return max_positions
    return int(max_positions * rope.factor)


def _check_context(fields: ConfigFields, wanted: int | None, own: int) -> None:
    if wanted is not None and wanted < 1:
        raise ModelConfigError(f"context length {wanted} is not positive")
    if wanted is not None and wanted > own:
        raise ModelConfigError(f"context length {wanted} is more than the model's {own} ({fields.where})")


def _dtype(fields: ConfigFields) -> str:
    dtype = fields.text("dtype", fields.text("torch_dtype", "float32")).removeprefix("torch.")
    if dtype not in _DTYPES:
        raise ModelConfigError(f"{fields.where}: dtype {dtype!r} is not supported ({', '.join(_DTYPES)})")
    return dtype
