"""Rotary position embedding (half-split pairs: dimension i goes with i + d/2).

Sources: llama3 bands and yarn as in transformers' ``modeling_rope_utils`` (5.17).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from sglang.srt.configs.rope_config import RopeConfig


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """cos and signed sin of the positions of one forward, computed once for all layers."""

    cos: torch.Tensor  # [T, 1, d]
    sin: torch.Tensor  # [T, 1, d]; the first half is negated

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x: [T, heads, d] -> same shape and dtype; computed in the tables' dtype.

        Of a head that is wider than the tables only its first dimensions are turned.
        """
        size = self.cos.shape[-1]
        wide = x[..., :size].to(self.cos.dtype)
        turned = torch.addcmul(wide * self.cos, wide.roll(size // 2, dims=-1), self.sin).to(x.dtype)
        return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), dim=-1)


class Rope:
    """Tables for positions 0 … max_positions - 1, float64 in a float64 model, else float32.

    ``max_positions`` is the caller's: the context and the margin that a step may run over it.
    """

    def __init__(
        self,
        config: RopeConfig,
        head_dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str,
        width: int | None = None,
    ) -> None:
        """head_dim: the dimensions that are turned. ``width``: of the tables, if they are to be wider; pairs
        are then half of it apart, and the last ones of each half stay as they are.
        """
        assert head_dim % 2 == 0, f"rope needs an even head_dim, not {head_dim}"
        inv_freq = inverse_frequencies(config, head_dim)  # [d/2] float64
        angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * inv_freq  # [P, d/2]
        scale = _yarn_scale(config) if config.kind == "yarn" else 1.0
        table_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        stay = 0 if width is None else (width - head_dim) // 2
        cos = F.pad(angles.cos() * scale, (0, stay), value=1.0)
        sin = F.pad(angles.sin() * scale, (0, stay))
        self.cos = torch.cat((cos, cos), dim=1).to(device, table_dtype)  # [P, d]
        self.sin = torch.cat((-sin, sin), dim=1).to(device, table_dtype)  # [P, d]

    @property
    def max_positions(self) -> int:
        return self.cos.shape[0]

    def at(self, positions: torch.Tensor) -> RopeAngles:
        """positions: [T] int64, below ``max_positions``."""
        return RopeAngles(
            self.cos.index_select(0, positions)[:, None], self.sin.index_select(0, positions)[:, None]
        )


def inverse_frequencies(config: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] float64: radians a position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    plain = config.theta**-exponents
    if config.kind == "linear":
        return plain / config.factor
    if config.kind == "llama3":
        return _llama3(config, plain)
    if config.kind == "yarn":
        return _yarn(config, plain, head_dim)
    assert config.kind == "default", config.kind
    return plain


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Short wavelengths stay, long ones are stretched, those between are blended."""
    rotations = config.original_max_positions * plain / (2 * math.pi)  # in the original context
    low, high = config.low_freq_factor, config.high_freq_factor
    blend = ((rotations - low) / (high - low)).clamp(0.0, 1.0)  # 1: keep, 0: stretch
    return plain * (blend + (1.0 - blend) / config.factor)


def _yarn(config: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Dimensions that turn often stay, those that hardly turn are stretched, a ramp between."""

    def dimension(rotations: float) -> float:
        wavelengths = config.original_max_positions / (rotations * 2 * math.pi)
        return head_dim * math.log(wavelengths) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / width).clamp(0.0, 1.0)
    return plain * ((1.0 - ramp) + ramp / config.factor)


def _yarn_scale(config: RopeConfig) -> float:
    """What cos and sin are multiplied by."""

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(config.factor) + 1.0 if config.factor > 1.0 else 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return mscale(config.mscale) / mscale(config.mscale_all_dim)
    return mscale(1.0)
