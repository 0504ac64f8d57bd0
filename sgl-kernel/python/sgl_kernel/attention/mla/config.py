"""Launch constants of latent attention, by what they depend on, with the reasons.

Those for sm_90 are measured (``benchmark/attention/mla_speed.py --sweep``): with 8 heads 0.77 of copying
for 16 rows of 16,384 places, where constants chosen by registers alone gave 0.33; with 64 heads 61 us for 64
rows of 1,024 places instead of 97. They are the best of a sweep for a cache of 1 byte too. The others are
chosen from compiled shared memory and registers.
"""

from __future__ import annotations

from sgl_kernel.attention.decode.config import DecodeConfig
from sgl_kernel.launch import next_power_of_2


def latent_config(
    arch: int, query_len: int, num_heads: int, latent_dim: int, kv_itemsize: int
) -> DecodeConfig:
    """query_len: of a row; latent_dim: R, what the accumulator has of each query and head."""
    tile_rows = query_len * num_heads
    roomy = arch in (80, 90, 100, 103)  # 163 KB of shared memory a SM and more; 99 KB elsewhere
    if arch >= 90 and roomy and latent_dim <= 512:
        is_wordy = query_len > 16 or num_heads & (num_heads - 1) > 0
        return _measured(tile_rows, latent_dim, is_wordy, kv_itemsize == 1)
    width = next_power_of_2(latent_dim)
    # 32 rows take 232 to 255 registers a thread: the queries stay there. With a cache of 1 byte a block needs
    # room for its converted numbers as well. Tiles of the same places share them in the L2.
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


def _measured(tile_rows: int, latent_dim: int, is_wordy: bool, is_narrow: bool) -> DecodeConfig:
    """Two programs a SM keep more in flight than one with wider blocks; two tiles of 32 rows do not fit.

    ``is_wordy``: a division finds row and head, or a tree has two words: 64 places a block would spill.
    ``is_narrow``: blocks are converted; what the merge loads at once would spill too.
    """
    small = tile_rows <= 16
    return DecodeConfig(
        block_m=16 if small else 32,
        block_n=32 if small or is_wordy else 64,
        num_warps=4 if small else 8,
        num_stages=3,
        programs_per_sm=2 if small else 1,
        min_chunk=128,
        fan_in=8,
        at_once=4 if small and latent_dim <= 128 else 1 if small or is_wordy or is_narrow else 2,
    )
