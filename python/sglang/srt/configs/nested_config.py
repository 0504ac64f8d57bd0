"""Models that see images keep the language model's fields in an object of their own."""

from __future__ import annotations

from typing import Final

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError

_NESTED: Final = ("KimiK25ForConditionalGeneration",)
_COMMON: Final = (
    "eos_token_id",
    "bos_token_id",
    "dtype",
    "torch_dtype",
    "tie_word_embeddings",
    "quantization_config",
)
"""Fields that such files have beside that object as well as, or instead of, inside it."""


def language_fields(fields: ConfigFields, architecture: str) -> ConfigFields:
    """The language model's fields, with what it inherits from the whole.

    Raises:
        ModelConfigError: they are not there.
    """
    if architecture not in _NESTED:
        return fields
    if not fields.has("text_config"):
        raise ModelConfigError(f"{fields.where} lacks 'text_config', where {architecture} has its fields")
    inner = fields.child("text_config")
    inherited = {name: fields.raw[name] for name in _COMMON if fields.has(name)}
    own = {name: value for name, value in inner.raw.items() if value is not None}
    return ConfigFields(inherited | own, inner.where)
