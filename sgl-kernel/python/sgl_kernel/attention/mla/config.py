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
    # 32 rows take 232 to 255 registers a thread: the queries stay there. With a cache of 1 byte, whose blocks
    # are converted in registers, they spill. Tiles of the same places share them in the L2.
    block_m = 16 if tile_rows <= 16 or kv_itemsize == 1 else 32
    return DecodeConfig(
        block_m=block_m,
        # 36 KB of bf16 latents and keys; half of it where two blocks in flight do not fit beside 32 rows.
        block_n=32 if roomy or block_m == 16 else 16,
        num_warps=8,  # 4 need 240 to 252 registers already for 16 rows
        num_stages=3,  # two blocks in flight
        programs_per_sm=1,
        min_chunk=128,
        fan_in=8,
        at_once=4 if block_m * width <= 2048 else 1,
    )
