"""The matrices of a layer's experts, as a checkpoint packs them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

import torch


class Format(Enum):
    PLAIN = "plain"  # bfloat16, float16 (or float32)
    INT4 = "int4"  # compressed-tensors, pack-quantized: groups of 32 columns, no zero points
    NVFP4 = "nvfp4"  # modelopt: e2m1 codes, an e4m3 scale for 16 columns, one scale for a matrix
    MXFP4 = "mxfp4"  # e2m1 codes, an e8m0 scale (a power of 2) for 32 columns: GPT-OSS
    FP8 = "fp8"  # e4m3, a scale for a block of rows and columns, for a row, or for the whole


FORMATS: Final = {Format.PLAIN: 0, Format.INT4: 1, Format.NVFP4: 2, Format.FP8: 3, Format.MXFP4: 4}
"""What kernels call them."""

GROUP: Final = {Format.INT4: 32, Format.NVFP4: 16, Format.MXFP4: 32}
"""Columns that one scale serves."""

PACKED: Final = frozenset(GROUP)
"""Formats of eight weights a word."""

MXFP4_LARGEST: Final = 128
"""Of the scales' exponents, biased by 127: a factor of 2, so weights up to 12. Kernels hold 2 ** 126 times a
scale in bfloat16."""

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """``E`` matrices of N rows and K columns; with gate and up in one, the gate's N / 2 rows come first.

    INT4: ``w[n, k] = (q[n, k] - 8) * scale[n, k // 32]``; NVFP4: ``e2m1(code[n, k]) * scale[n, k // 16] *
    global_scale``; MXFP4: ``e2m1(code[n, k]) * 2 ** (scale[n, k // 32] - 127)``. Of a word, column ``8 j +
    i`` lies in bits ``4 i … 4 i + 3``. (Of NVFP4's and MXFP4's bytes, the even column in the low half: four
    of them are such a word on a little-endian machine.) FP8: ``data[n, k] * scale[n // rows, k //
    columns]`` with ``block`` (rows, columns), rows counted within their part.
    """

    format: Format
    data: torch.Tensor  # PLAIN, FP8 (float8_e4m3fn): [E, N, K]; else [E, N, K / 8] int32
    # INT4: [E, N, K / 32]; NVFP4: [E, N, K / 16] float8_e4m3fn; MXFP4: [E, N, K / 32] uint8, at most
    # MXFP4_LARGEST; FP8: [E, blocks of rows, of columns] float32
    scale: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None  # NVFP4: [E, parts] float32, parts 1 or 2 (gate, up)
    block: tuple[int, int] = (0, 0)  # FP8: rows and columns that share a scale
    parts: int = 1  # FP8: 2: gate and up, whose blocks are counted apart
    bias: torch.Tensor | None = None  # [E, N]
    # NVFP4, where a checkpoint has them: [E, parts] float32, for inputs in 4 bits (``sgl_kernel.fp4``)
    input_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        assert self.bias is None or (self.bias.shape == self.data.shape[:2] and self.bias.is_contiguous())
        if self.format is Format.PLAIN:
            return
        if self.format is Format.FP8:
            self._check_blocks()
            return
        assert self.data.dtype == torch.int32 and self.scale is not None
        columns = self.data.shape[2] * 8
        if self.scale.shape != (*self.data.shape[:2], columns // GROUP[self.format]) or columns % 32:
            raise ValueError(
                f"{self.format.value} experts of {tuple(self.data.shape)} words need a scale for every"
                f" {GROUP[self.format]} columns (a multiple of 32); there are {tuple(self.scale.shape)}"
            )
        assert (self.global_scale is not None) == (self.format is Format.NVFP4)

    def _check_blocks(self) -> None:
        assert self.data.dtype == torch.float8_e4m3fn and self.scale is not None
        (rows, columns), (num, n, k) = self.block, self.data.shape
        wanted = (num, self.parts * -(-n // (self.parts * rows)), -(-k // columns))
        if tuple(self.scale.shape) != wanted:
            raise ValueError(
                f"fp8 experts of {tuple(self.data.shape)} in blocks of {rows} x {columns} need scales of"
                f" {wanted}; there are {tuple(self.scale.shape)}"
            )
        if columns < k and columns % 64:
            raise ValueError(f"fp8 blocks of {columns} columns are not supported: use a multiple of 64")

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        return self.data.shape[1]

    @property
    def columns(self) -> int:
        return self.data.shape[2] * (8 if self.format in PACKED else 1)

    @property
    def weight_bytes(self) -> int:
        parts = [t for t in (self.data, self.scale, self.global_scale, self.bias) if t is not None]
        return sum(t.numel() * t.element_size() for t in parts)

    @property
    def bytes_per_expert(self) -> int:
        return self.weight_bytes // self.num_experts

    def dequantise(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, K], each value rounded once to ``dtype`` (once to float32 where that is narrower)."""
        if self.format is Format.PLAIN:
            return self.data[expert].to(dtype)
        assert self.scale is not None
        work = torch.promote_types(dtype, torch.float32)
        own_scale = self.scale[expert].to(work)
        if self.format is Format.MXFP4:
            own_scale = torch.exp2(own_scale - 127)
        if self.format is Format.FP8:
            return (self.data[expert].to(work) * self._by_weight(own_scale)).to(dtype)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.data.device)
        codes = ((self.data[expert][..., None] >> shifts) & 15).flatten(-2)  # [N, K]
        scale = own_scale.repeat_interleave(GROUP[self.format], dim=-1)
        if self.format is Format.INT4:
            return ((codes - 8).to(work) * scale).to(dtype)
        values = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=work, device=self.data.device)
        if self.format is Format.MXFP4:
            return (values[codes] * scale).to(dtype)
        assert self.global_scale is not None
        own = self.global_scale[expert].to(work)  # [parts]
        whole = own.repeat_interleave(self.rows // own.shape[0])[:, None]  # [N, 1]
        return (values[codes] * scale * whole).to(dtype)

    def _by_weight(self, scale: torch.Tensor) -> torch.Tensor:
        """[blocks of rows, of columns] -> [N, K]; blocks at the edges may be cut."""
        rows, columns = self.block
        each = self.rows // self.parts
        halves = [part.repeat_interleave(rows, 0)[:each] for part in scale.chunk(self.parts)]
        return torch.cat(halves).repeat_interleave(columns, 1)[:, : self.columns]
