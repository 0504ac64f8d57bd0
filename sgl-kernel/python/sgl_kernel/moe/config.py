"""Launch constants of experts' products, by what they depend on, with the reasons.

They are chosen from compiled shared memory, registers and instructions of a pass; an H200 has shown that what
those say counts (docs/perf_log.md). ``benchmark/moe/moe_sweep.py`` times others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from sgl_kernel._dispatch import DeviceInfo
from sgl_kernel.moe.weights import PACKED, ExpertMatrix, Format


@dataclass(frozen=True, slots=True)
class ProductConfig:
    block_n: int  # rows of the matrix a program takes; of gate and of up each
    width: int  # words a pass (columns, for plain weights)
    split: int  # programs that share the columns of such rows
    num_warps: int
    num_stages: int  # num_stages - 1 tiles of weights are in flight
    pairs: bool  # unpack two weights an instruction
    row_tiles: int = 1  # blocks of rows that a program takes in turn, where one pass takes all columns

    def chunk(self, matrix: ExpertMatrix) -> int:
        """Columns that a program goes through, whole passes."""
        step = self.width * (8 if matrix.format in PACKED else 1)
        return -(-matrix.columns // (self.split * step)) * step


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    block_m: int  # tokens of one expert that a program multiplies
    gate_up: ProductConfig
    down: ProductConfig


def experts_config(
    info: DeviceInfo, num_tokens: int, top_k: int, gate_up: ExpertMatrix, down: ExpertMatrix
) -> ExpertsConfig:
    # A tile has room for twice the tokens that an expert has on average; what does not fit reads the weights
    # once more, out of the L2.
    average = num_tokens * top_k / gate_up.num_experts
    block_m = next((size for size in (8, 16, 32) if 2 * average <= size), 64)
    blocks = min(num_tokens * top_k, gate_up.num_experts)
    make = partial(_product, info, block_m, blocks)
    return ExpertsConfig(block_m, make(gate_up, 2), make(down, 1))


def pairs_config(
    info: DeviceInfo, num_tokens: int, top_k: int, gate_up: ExpertMatrix, down: ExpertMatrix
) -> ExpertsConfig:
    """Of products with a program for each pair (``pairs.py``); down is not split.

    Measured on an H200 with 1 to 8 tokens: three programs a SM of gate and up, as many as fit; what takes all
    columns in one pass is on its way early, and more of it with smaller tiles.
    """
    num_pairs = num_tokens * top_k
    up, last = _product(info, 8, num_pairs, gate_up, 2), _product(info, 8, num_pairs, down, 1)
    programs = num_pairs * -(-gate_up.rows // (2 * up.block_n))
    passes = -(-gate_up.columns // (up.width * (8 if gate_up.format in PACKED else 1)))
    split = max(1, min(passes // 2, round(3 * info.num_sms / programs)))
    if down.format in PACKED and 8 * last.width >= down.columns:
        last = replace(last, block_n=32, num_warps=2)
    return ExpertsConfig(8, replace(up, split=split), replace(last, split=1, row_tiles=1))


def one_matrix_config(info: DeviceInfo, num_rows: int, matrix: ExpertMatrix, matrices: int) -> ProductConfig:
    """Of a product of one matrix (of gate and up: 2) with up to 64 rows in one tile."""
    return _product(info, next(size for size in (8, 16, 32, 64) if num_rows <= size), 1, matrix, matrices)


def _product(
    info: DeviceInfo, block_m: int, blocks: int, matrix: ExpertMatrix, matrices: int
) -> ProductConfig:
    if matrix.format in PACKED:
        return _packed(info, block_m, blocks, matrix, matrices)
    width = 128 if matrix.format is Format.FP8 and block_m <= 16 and matrix.block[1] % 128 == 0 else 64
    block_n = 64 // matrices
    programs = blocks * -(-matrix.rows // (matrices * block_n))
    return ProductConfig(
        block_n=block_n,
        width=width,
        split=_split(4 * info.num_sms, programs, -(-matrix.columns // width)),
        # As for packed words, where there is something to convert.
        num_warps=block_n // 16 if matrix.format is Format.FP8 else 4,
        num_stages=3,
        pairs=False,
    )


def _packed(
    info: DeviceInfo, block_m: int, blocks: int, matrix: ExpertMatrix, matrices: int
) -> ProductConfig:
    """Bound by unpacking as much as by reading: a warp for 16 rows, since where there are more of them,
    several unpack the same words, each for some of the tokens.

    Measured on an H200 with 1 to 32 tokens, 384 experts and 7168 columns or rows: 64 rows, three to eight
    splits of few programs, 4 or 16 tiles in turn.
    """
    # sm_120 would hold one program a SM of 64 rows of gate and of up.
    block_n = 32 if info.arch >= 120 and matrices == 2 else 64
    # 128 bytes of a row a pass: a line of the memory. With more than 16 tokens half of it: their part of a
    # pass alone would leave sm_120 one program a SM. The scales of a pass must be at least 4 bytes a thread,
    # or they are loaded in the loop and waited for (MXFP4's of 16 words are 2 bytes: not measured).
    width = 32 if block_m <= 16 else 16
    if 8 * width > matrix.columns:
        width = 16  # the words of a pass are the inner size of a tl.dot, which is 16 at least
    programs = blocks * -(-matrix.rows // (matrices * block_n))
    passes = -(-matrix.columns // (8 * width))
    in_turn = 1
    if passes == 1 and matrices == 1 and programs > info.num_sms:
        in_turn = 4 if programs < 150 * info.num_sms else 16
    most = 8 if programs < info.num_sms // 2 else 3
    return ProductConfig(
        block_n=block_n,
        width=width,
        split=min(most, _split(12 * info.num_sms, programs, passes)),
        num_warps=block_n // 16,
        num_stages=3,
        pairs=info.arch >= 80,
        row_tiles=in_turn,
    )


def _split(wanted: int, programs: int, passes: int) -> int:
    """As many programs as keep enough in flight; what is split must be merged, so no more than that."""
    return max(1, min(8, wanted // max(programs, 1), passes // 2))
