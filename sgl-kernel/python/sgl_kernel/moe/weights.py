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


GROUP: Final = {Format.INT4: 32, Format.NVFP4: 16}
"""Columns that one scale serves."""

E2M1: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True, slots=True)
class ExpertMatrix:
    """``E`` matrices of N rows and K columns; with gate and up in one, the gate's N / 2 rows come first.

    INT4: ``w[n, k] = (q[n, k] - 8) * scale[n, k // 32]``; NVFP4: ``e2m1(code[n, k]) * scale[n, k // 16] *
    global_scale``. Of a word, column ``8 j + i`` lies in bits ``4 i … 4 i + 3``. (Of NVFP4's bytes, the even
    column in the low half: four of them are such a word on a little-endian machine.)
    """

    format: Format
    data: torch.Tensor  # PLAIN: [E, N, K]; else [E, N, K / 8] int32
    scale: torch.Tensor | None = None  # INT4: [E, N, K / 32]; NVFP4: [E, N, K / 16] float8_e4m3fn
    global_scale: torch.Tensor | None = None  # NVFP4: [E, parts] float32, parts 1 or 2 (gate, up)

    def __post_init__(self) -> None:
        if self.format is Format.PLAIN:
            return
        assert self.data.dtype == torch.int32 and self.scale is not None
        columns = self.data.shape[2] * 8
        if self.scale.shape != (*self.data.shape[:2], columns // GROUP[self.format]) or columns % 32:
            raise ValueError(
                f"{self.format.value} experts of {tuple(self.data.shape)} words need a scale for every"
                f" {GROUP[self.format]} columns (a multiple of 32); there are {tuple(self.scale.shape)}"
            )
        assert (self.global_scale is not None) == (self.format is Format.NVFP4)

    @property
    def num_experts(self) -> int:
        return self.data.shape[0]

    @property
    def rows(self) -> int:
        return self.data.shape[1]

    @property
    def columns(self) -> int:
        return self.data.shape[2] * (1 if self.format is Format.PLAIN else 8)

    @property
    def bytes_per_expert(self) -> int:
        parts = [t for t in (self.data, self.scale, self.global_scale) if t is not None]
        return sum(t.numel() * t.element_size() for t in parts) // self.num_experts

    def dequantise(self, expert: int, dtype: torch.dtype) -> torch.Tensor:
        """[N, K], each value rounded once to ``dtype`` (once to float32 where that is narrower)."""
        if self.format is Format.PLAIN:
            return self.data[expert].to(dtype)
        assert self.scale is not None
        work = torch.promote_types(dtype, torch.float32)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=self.data.device)
        codes = ((self.data[expert][..., None] >> shifts) & 15).flatten(-2)  # [N, K]
        scale = self.scale[expert].to(work).repeat_interleave(GROUP[self.format], dim=-1)
        if self.format is Format.INT4:
            return ((codes - 8).to(work) * scale).to(dtype)
        values = torch.tensor((*E2M1, *(-v for v in E2M1)), dtype=work, device=self.data.device)
        assert self.global_scale is not None
        own = self.global_scale[expert].to(work)  # [parts]
        whole = own.repeat_interleave(self.rows // own.shape[0])[:, None]  # [N, 1]
        return (values[codes] * scale * whole).to(dtype)
