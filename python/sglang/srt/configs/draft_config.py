"""The fields that only an EAGLE-3 draft checkpoint's config.json has, in the forms that trainers write.

SafeAILab, SpecForge (SGLang), TorchSpec and NVIDIA's Model Optimizer write one flat object, some of it in
``eagle_config``; vLLM's speculators puts the layer's fields into ``transformer_layer_config``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError

LLAMA_DRAFTER: Final = "LlamaForCausalLMEagle3"
MLA_DRAFTER: Final = "Eagle3DeepseekV2ForCausalLM"
DRAFT_ARCHITECTURES: Final = (LLAMA_DRAFTER, MLA_DRAFTER)

_OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Eagle3LlamaForCausalLM": LLAMA_DRAFTER,
        "Eagle3DeepseekV3ForCausalLM": MLA_DRAFTER,
        "Eagle3Speculator": LLAMA_DRAFTER,
        "Eagle3DraftModel": LLAMA_DRAFTER,
    }
)

_SPECULATORS_KIND: Final = "speculators_model_type"
_LAYER: Final = "transformer_layer_config"

# What speculators leaves out of a layer's fields, because it is transformers' default for the kind of layer.
_LAYER_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama": {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
        "qwen3": {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 22016,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
    }
)


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """See the shapes in ``models/eagle3.py``."""

    draft_vocab_size: int | None  # None: the target's vocabulary and the target's lm_head
    target_hidden_size: int
    num_aux: int  # target layers whose hidden states ``fc`` reads
    aux_layer_ids: tuple[int, ...] | None  # as in the file; None: default ones
    fc_bias: bool
    norm_before_fc: bool  # one norm over the concatenated hidden states
    fc_norm: bool  # one norm for each of them
    norm_output: bool  # the next draft forward reads the normed output
    norm_before_residual: bool = False  # the layer's residual is the normed hidden state
    ids_name_inputs: bool = False  # aux_layer_ids are layers whose input is read; else see ``aux_layers``
    own_embedding: bool = False  # trained with the drafter; else the target's, if it is as wide

    def aux_layers(self, num_target_layers: int, target_has_mla: bool = False) -> tuple[int, ...]:
        """Target layers whose *input* is read, in the order in which ``fc`` reads them.

        The default ids are inputs already; explicit ids name outputs, so they are shifted by one (what
        SGLang does for most targets). For DeepSeek's kind of target it shifts them only if the first one
        is 1: drafters whose ids begin elsewhere ([2, 30, 58]) name inputs. Those of speculators always do.

        Raises:
            ModelConfigError: ids that the target doesn't have.
        """
        n = num_target_layers
        if self.aux_layer_ids is None:
            layers: tuple[int, ...] = (2, n // 2, n - 3)
        else:
            names_inputs = self.ids_name_inputs or (target_has_mla and self.aux_layer_ids[0] != 1)
            shift = 0 if names_inputs else 1
            layers = tuple(i + shift for i in self.aux_layer_ids)
        if len(layers) != self.num_aux:
            raise ModelConfigError(
                f"the draft model reads {self.num_aux} hidden states, but {len(layers)} layers are given"
            )
        if any(not 0 <= layer <= n for layer in layers):
            raise ModelConfigError(f"the draft model reads layers {layers} of a target with {n} layers")
        return layers


def draft_fields(fields: ConfigFields, architecture: str) -> tuple[ConfigFields, str]:
    """The fields as one flat object, and the one of ``DRAFT_ARCHITECTURES`` that a file means.

    Raises:
        ModelConfigError: a kind of drafter, or of its layer, that isn't supported.
    """
    if architecture == "LlamaForCausalLM" and fields.has("draft_vocab_size"):
        return fields, LLAMA_DRAFTER  # how SafeAILab's files name it
    if not fields.has(_SPECULATORS_KIND):
        return fields, _OTHER_NAMES.get(architecture, architecture)
    if (kind := fields.text(_SPECULATORS_KIND)) != "eagle3":
        raise ModelConfigError(f"{fields.where}: {_SPECULATORS_KIND} {kind!r} is not supported (only eagle3)")
    layer = fields.child(_LAYER)
    if (of_layer := layer.text("model_type", "llama")) not in _LAYER_DEFAULTS:
        raise ModelConfigError(
            f"{layer.where}: model_type {of_layer!r} is not supported ({', '.join(_LAYER_DEFAULTS)})"
        )
    own = {name: value for name, value in fields.raw.items() if name != _LAYER and value is not None}
    merged = {**_LAYER_DEFAULTS[of_layer], **layer.raw, **own}
    return ConfigFields(merged, fields.where), LLAMA_DRAFTER


def read_draft(fields: ConfigFields) -> DraftConfig:
    """Read the draft fields.

    Raises:
        ModelConfigError: a drafter of more than one layer, or one of another form than here.
    """
    if (num_layers := fields.integer("num_hidden_layers")) != 1:
        raise ModelConfigError(f"{fields.where}: draft models have 1 layer here, this one has {num_layers}")
    eagle = fields.child("eagle_config")
    _check_form(fields, eagle)
    ids = eagle.integers("eagle_aux_hidden_state_layer_ids") or fields.integers(
        "eagle_aux_hidden_state_layer_ids"
    )
    return DraftConfig(
        draft_vocab_size=fields.optional_integer("draft_vocab_size"),
        target_hidden_size=fields.integer("target_hidden_size", fields.integer("hidden_size")),
        num_aux=fields.integer("num_aux_hidden_states", len(ids) or 3),
        aux_layer_ids=ids or None,
        ids_name_inputs=fields.has(_SPECULATORS_KIND),
        fc_bias=fields.flag("bias"),
        norm_before_fc=_any_flag(fields, eagle, "norm_before_fc"),
        fc_norm=_any_flag(fields, eagle, "fc_norm", "use_aux_norm"),
        norm_output=_any_flag(fields, eagle, "norm_output"),
        norm_before_residual=_any_flag(fields, eagle, "norm_before_residual"),
        own_embedding=fields.flag("embed_requires_grad"),
    )


def _check_form(fields: ConfigFields, eagle: ConfigFields) -> None:
    """Switches of Model Optimizer that nobody sets otherwise, and a layer without a rope."""
    for name, wanted in (
        ("use_aux_hidden_state", True),
        ("use_input_layernorm_in_first_layer", True),
        ("use_last_layernorm", True),
        ("use_mtp_layernorm", False),
    ):
        if eagle.flag(name, wanted) != wanted:
            raise ModelConfigError(f"{eagle.where}: {name} {str(not wanted).lower()} is not supported")
    if fields.flag("mla_use_nope"):
        raise ModelConfigError(f"{fields.where}: mla_use_nope true is not supported")


def _any_flag(fields: ConfigFields, eagle: ConfigFields, *names: str) -> bool:
    return any(source.flag(name) for source in (fields, eagle) for name in names)
