"""Launch constants of latent attention, by what they depend on, with the reasons.

None is measured yet (``benchmark/attention/mla_speed.py --sweep`` does it); they are chosen from compiled
shared memory and registers.
"""

from __future__ import annotations

from sgl_kernel.attention.decode.config import DecodeConfig
from sgl_kernel.launch import next_power_of_2


def latent_config(arch: int, tile_rows: int, latent_dim: int, kv_itemsize: int) -> DecodeConfig:
    """tile_rows: queries a row times heads; latent_dim: R, what the accumulator has of each."""
    roomy = arch in (80, 90, 100, 103)  # 163 KB of shared memory a SM and more; 99 KB elsewhere
    width = next_power_of_2(latent_dim)
    block_m = 16 if tile_rows <= 16 else 32
    return DecodeConfig(
        block_m=block_m,
        block_n=32,
        num_warps=8,
        num_stages=3 if roomy else 2,
        programs_per_sm=1,
        min_chunk=128,
        fan_in=8,
        at_once=4 if block_m * width <= 2048 else 1,
    )
