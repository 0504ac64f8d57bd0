"""The fields that only an EAGLE-3 draft checkpoint's config.json has."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """See the shapes in ``models/llama_eagle3.py``."""

    draft_vocab_size: int | None  # None: the target's vocabulary and the target's lm_head
    target_hidden_size: int
    num_aux: int  # target layers whose hidden states ``fc`` reads
    aux_layer_ids: tuple[int, ...] | None  # as in the file ("output of layer id"); None: default ones
    fc_bias: bool
    norm_before_fc: bool  # one norm over the concatenated hidden states
    fc_norm: bool  # one norm for each of them
    norm_output: bool  # the next draft forward reads the normed output

    def aux_layers(self, num_target_layers: int, target_has_mla: bool = False) -> tuple[int, ...]:
        """Target layers whose *input* is read, in the order in which ``fc`` reads them.

        The default ids are inputs already; explicit ids name outputs, so they are shifted by one (what
        SGLang does for most targets). For DeepSeek's kind of target it shifts them only if the first one
        is 1: drafters whose ids begin elsewhere ([2, 30, 58]) name inputs.

        Raises:
            ModelConfigError: ids that the target doesn't have.
        """
        n = num_target_layers
        if self.aux_layer_ids is None:
            layers: tuple[int, ...] = (2, n // 2, n - 3)
        else:
            shift = 0 if target_has_mla and self.aux_layer_ids[0] != 1 else 1
            layers = tuple(i + shift for i in self.aux_layer_ids)
        if len(layers) != self.num_aux:
            raise ModelConfigError(
                f"the draft model reads {self.num_aux} hidden states, but {len(layers)} layers are given"
            )
        if any(not 0 <= layer <= n for layer in layers):
            raise ModelConfigError(f"the draft model reads layers {layers} of a target with {n} layers")
        return layers


def read_draft(fields: ConfigFields) -> DraftConfig:
    """Read the draft fields.

    Raises:
        ModelConfigError: a drafter of more than one layer, or one that reads no hidden states.
    """
    if (num_layers := fields.integer("num_hidden_layers")) != 1:
        raise ModelConfigError(f"{fields.where}: draft models have 1 layer here, this one has {num_layers}")
    eagle = fields.child("eagle_config")
    if not eagle.flag("use_aux_hidden_state", True):
        raise ModelConfigError(f"{fields.where}: use_aux_hidden_state false is not supported")
    ids = eagle.integers("eagle_aux_hidden_state_layer_ids") or fields.integers(
        "eagle_aux_hidden_state_layer_ids"
    )
    return DraftConfig(
        draft_vocab_size=fields.optional_integer("draft_vocab_size"),
        target_hidden_size=fields.integer("target_hidden_size", fields.integer("hidden_size")),
        num_aux=fields.integer("num_aux_hidden_states", len(ids) or 3),
        aux_layer_ids=ids or None,
        fc_bias=fields.flag("bias"),
        norm_before_fc=eagle.flag("norm_before_fc", fields.flag("norm_before_fc")),
        fc_norm=_any_flag(fields, eagle, "fc_norm", "use_aux_norm"),
        norm_output=_any_flag(fields, eagle, "norm_output"),
    )


def _any_flag(fields: ConfigFields, eagle: ConfigFields, *names: str) -> bool:
    return any(source.flag(name) for source in (fields, eagle) for name in names)
