"""Launch constants of decode attention, by what they depend on, with the reasons.

Those for 16 tile rows on sm_90 are measured (``benchmark/attention/decode_speed.py --sweep``: one setting
is within 6 % of the best of 32 for 4 to 64 rows of 1152 and 8192 places, 1 and 4 queries); the others are
chosen from compiled shared memory and registers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    block_m: int  # tile rows: (query, head of the group) pairs; 16 is the least a tensor core takes
    block_n: int  # places a pass
    num_warps: int
    num_stages: int  # num_stages - 1 blocks of K and V are in flight
    programs_per_sm: int  # as many as are resident together, so that a step is one wave
    min_chunk: int  # places; shorter chunks would cost more to merge than they save
    fan_in: int  # partials merged by one program; more are merged in levels
    at_once: int  # partials loaded together while merging
    max_registers: int | None = None


def decode_config(
    arch: int, tile_rows: int, head_dim: int, kv_itemsize: int, page_size: int = 1
) -> DecodeConfig:
    """tile_rows: queries a row times query heads per KV head."""
    roomy = arch in (80, 90, 100, 103)  # 163 KB of shared memory a SM and more; 99 KB elsewhere
    block_m = 16 if tile_rows <= 16 else 32 if tile_rows <= 32 else 64
    if head_dim > 128:
        block_m = min(block_m, 32)  # the accumulator of 64 x 256 alone would take 128 registers
    # A block of K and V holds 16 KB (32 where a tile has more rows to compute on big chips). Two in
    # flight for each of 2 programs are 64 KB a SM, more than bandwidth times latency (about 35 and 8 KB);
    # 32 KB for each of 3 programs is 12 % slower on 64 x 8192.
    # A cache of 1 byte has blocks of as many places (more would need 255 registers to convert them),
    # so twice as many in flight.
    row_bytes = 2 * _power_of_2(head_dim) * max(kv_itemsize, 2)
    block_n = min(128, max(16, (32768 if roomy and block_m > 16 else 16384) // row_bytes))
    if block_m == 64:
        # Scores of 64 x 128 spill beside the accumulator, and with places to work out from pages (8 to 120
        # bytes, head size 128) so do those of 64 x 64.
        block_n = min(block_n, 64 if page_size == 1 or head_dim <= 64 else 32)
    at_once = 4 if block_m * head_dim <= 2048 else 1  # partials in registers
    # ptxas spills to reach an occupancy (32 x 64 on sm_120: 8 bytes at 96 registers; 64 x 128: 2 registers at
    # 72), though 2 programs a SM leave room for 255; 64 rows with a tree's mask take 170 on sm_90, so that a
    # second program of 8 warps finds no room. So many registers are enough, and no more are taken.
    # 32 x 128 of head size 64 takes 255 at most, which 2 programs of 4 warps have. 64 rows on sm_120, one
    # program of 8 warps, spill 8 and 16 bytes at 128 where a group has 12 heads.
    is_small = block_m == 16 or (block_m == 32 and head_dim <= 64 and not roomy)
    is_wide = (block_m == 32 and head_dim <= 64 and roomy) or (block_m == 64 and not roomy)
    return DecodeConfig(
        block_m=block_m,
        block_n=block_n,
        num_warps=8 if block_m == 64 else 4,  # 4 warps need 231 to 245 registers for 64 x 128
        num_stages=3 if kv_itemsize > 1 else 5,
        programs_per_sm=2 if roomy or block_m < 64 else 1,
        min_chunk=max(2 * block_n, 128),
        # A level costs a store, a barrier and an atomic (about 1 us), loading a batch of partials less.
        fan_in=16 if at_once == 4 else 8,
        at_once=at_once,
        max_registers=255 if is_wide else 128 if is_small or (roomy and block_m == 64) else None,
    )


def _power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
