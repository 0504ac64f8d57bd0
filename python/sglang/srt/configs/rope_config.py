"""Rotary position embedding of a config, whichever generation of fields it is written in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from sglang.srt.configs.config_fields import ConfigFields, ModelConfigError

ROPE_KINDS: Final = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """``kind`` is one of ROPE_KINDS; fields that it has no use for keep their defaults."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0  # positions of the pretraining; llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn: scale of cos and sin; None: from factor
    mscale: float | None = None  # yarn, DeepSeek's fields
    mscale_all_dim: float | None = None
    truncate: bool = True  # yarn: whole dimensions as the ends of the ramp
    partial: float = 1.0  # part of a head that is turned, its first dimensions

    def turned(self, head_dim: int) -> int:
        """Dimensions of a head that are turned."""
        return int(head_dim * self.partial)


def read_rope(fields: ConfigFields, max_positions: int, partial: float | None = None) -> RopeConfig:
    """From ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (older).

    ``partial``: the family turns this part of a head unless its file says otherwise; None: all of it.

    Raises:
        ModelConfigError: a kind that isn't supported, or lacking fields.
    """
    if fields.has("rope_parameters"):
        rope = fields.child("rope_parameters")
        theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    else:
        rope = fields.child("rope_scaling")
        theta = fields.number("rope_theta", 10000.0)
    given = rope.number("partial_rotary_factor", fields.number("partial_rotary_factor", partial or 1.0))
    if given != 1.0 and partial is None:
        raise ModelConfigError(f"{rope.where}: partial_rotary_factor other than 1 is not supported")
    if not 0.0 < given <= 1.0:
        raise ModelConfigError(
            f"{rope.where}: partial_rotary_factor must be above 0 and at most 1, not {given}"
        )
    return replace(_read_kind(rope, theta, max_positions), partial=given)


def _read_kind(rope: ConfigFields, theta: float, max_positions: int) -> RopeConfig:
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in ROPE_KINDS:
        raise ModelConfigError(
            f"{rope.where}: rope type {kind!r} is not supported (supported: {', '.join(ROPE_KINDS)})"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    original = rope.optional_integer("original_max_position_embeddings") or max_positions
    common = RopeConfig(kind, theta, rope.number("factor"), original)
    if kind == "llama3":
        return _llama3(rope, common)
    return _yarn(rope, common) if kind == "yarn" else common


def _llama3(rope: ConfigFields, common: RopeConfig) -> RopeConfig:
    return RopeConfig(
        kind="llama3",
        theta=common.theta,
        factor=common.factor,
        original_max_positions=rope.integer("original_max_position_embeddings"),
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


def _yarn(rope: ConfigFields, common: RopeConfig) -> RopeConfig:
    def optional(name: str) -> float | None:
        return rope.number(name) if rope.has(name) else None

    return RopeConfig(
        kind="yarn",
        theta=common.theta,
        factor=common.factor,
        original_max_positions=common.original_max_positions,
        beta_fast=rope.number("beta_fast", 32.0),
        beta_slow=rope.number("beta_slow", 1.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
    )
