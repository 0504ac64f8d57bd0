"""Sliding windows: how many of the last places each layer's queries see."""

from __future__ import annotations

from typing import Final

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError

_MISTRAL_WINDOW: Final = 4096  # of a Mistral file that has no such field, as in transformers
_KINDS: Final = {"sliding_attention": True, "full_attention": False}


def read_windows(
    fields: ConfigFields, architecture: str, num_layers: int, context_len: int
) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees everything; () if all of them do.

    A window that reaches over the whole context is none.

    Raises:
        ModelConfigError: kinds of layers that aren't known, or not one for each layer.
    """
    if architecture == "MistralForCausalLM":
        silent = "sliding_window" not in fields.raw
        window = _MISTRAL_WINDOW if silent else fields.optional_integer("sliding_window")
        slides = [True] * num_layers
    elif architecture == "GptOssForCausalLM":
        window = fields.integer("sliding_window", 128)
        slides = _sliding_layers(fields, num_layers)
    else:
        return ()
    if window is None or window >= context_len or not any(slides):
        return ()
    return tuple(window if sliding else None for sliding in slides)


def _sliding_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        return [i % 2 == 0 for i in range(num_layers)]
    if not isinstance(kinds, list) or len(kinds) != num_layers or any(kind not in _KINDS for kind in kinds):
        raise ModelConfigError(
            f"{fields.where}: 'layer_types' must name {num_layers} layers, each one of {', '.join(_KINDS)}"
        )
    return [_KINDS[kind] for kind in kinds]
