"""Launch constants of experts' products, by what they depend on, with the reasons.

None is measured yet (``benchmark/moe/moe_speed.py --sweep`` does it); they are chosen from compiled shared
memory and registers.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    block_m = next((size for size in (16, 32) if 2 * average <= size), 64)
    blocks = min(num_tokens * top_k, gate_up.num_experts)
    return ExpertsConfig(
        block_m, _product(info, block_m, blocks, gate_up, 2), _product(info, block_m, blocks, down, 1)
    )


def _product(
    info: DeviceInfo, block_m: int, blocks: int, matrix: ExpertMatrix, matrices: int
) -> ProductConfig:
    is_packed = matrix.format in PACKED
    # 128 bytes of a row a pass: a line of the memory. With more than 16 tokens half of it, of twice as many
    # rows: the tokens' part of a pass alone would leave sm_120 one program a SM. The scales of a pass must be
    # at least 4 bytes a thread, or they are loaded in the loop and waited for.
    width = 64 if not is_packed else 32 if block_m == 16 else 16
    if matrix.format is Format.FP8 and block_m == 16 and matrix.block[1] % 128 == 0:
        width = 128
    while is_packed and width > 4 and 8 * width > matrix.columns:
        width //= 2
    block_n = 64 // matrices if not is_packed or block_m == 16 else 64
    # A warp for 16 rows: where there are more, several unpack the same words, each for some of the tokens.
    num_warps = block_n // 16 if is_packed else 4
    programs = blocks * -(-matrix.rows // (matrices * block_n))
    passes = -(-matrix.columns // (width * (8 if is_packed else 1)))
    # 16 warps a SM keep enough in flight; what is split must be merged, so no more than that.
    split = max(1, min(8, 16 // num_warps * info.num_sms // max(programs, 1), passes // 2))
    return ProductConfig(
        block_n=block_n,
        width=width,
        split=split,
        num_warps=num_warps,
        num_stages=3,
        pairs=is_packed and info.arch >= 80,
    )
