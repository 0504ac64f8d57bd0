"""Launch constants of an indexer's kernels, by what they depend on, with the reasons.

None is measured yet (``benchmark/attention/dsa_speed.py`` times them); they are chosen from compiled shared
memory and registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from sgl_kernel.attention.decode.config import DecodeConfig
from sgl_kernel.launch import next_power_of_2

MAX_TILE_ROWS: Final = 128
"""(query, head) pairs scored at once: 4 queries of 32 heads, or 2 of 64."""

BINS: Final = 256
"""Scores are counted by bins of an eighth of an octave of their size: 16 octaves below the largest size, for
those above 0 and those below it, and all that is smaller in the two bins about 0. Of 64k scores some hundreds
are in the bin that the last chosen one is in, whatever their scale and sign."""

BIN_SHIFT: Final = 20
"""A bin's scores agree in all but so many of their last bits."""


@dataclass(frozen=True, slots=True)
class SiftConfig:
    """How the highest scores are found."""

    # Scores that one program counts and chooses from; a context of 64k is 32 programs. With 4096 choosing
    # takes 172 to 203 registers a thread, so that a SM holds one program instead of two.
    chunk: int = 2048
    # Scores of the last bin that one program holds in registers. Where there are more it reads them again
    # and again, which takes long but is right.
    near: int = 2048
    num_warps: int = 8  # 8 scores a thread
    max_bytes: int = 256 << 20  # of scores and counts; a step with more goes through in groups of rows


def queries_at_once(query_len: int, num_heads: int) -> int:
    """Queries of a row whose scores one program makes of the same keys; a power of 2."""
    most = max(1, MAX_TILE_ROWS // max(16, next_power_of_2(num_heads)))
    return min(next_power_of_2(query_len), most)


def index_config(arch: int, query_len: int, num_heads: int) -> DecodeConfig:
    roomy = arch in (80, 90, 100, 103)  # 163 KB of shared memory a SM and more; 99 KB elsewhere
    heads = max(16, next_power_of_2(num_heads))  # 16: the least a tensor core takes
    block_m = queries_at_once(query_len, num_heads) * heads
    return DecodeConfig(
        block_m=block_m,
        block_n=64,  # 16 KB of keys of 128 numbers
        num_warps=8 if block_m > 64 else 4,
        num_stages=3,  # two blocks in flight for each program: 64 KB a SM, 32 where one needs little
        programs_per_sm=2 if roomy or block_m <= 64 else 1,
        min_chunk=128,
        fan_in=2,  # nothing is merged
        at_once=1,
    )
