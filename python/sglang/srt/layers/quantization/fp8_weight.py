"""float8 (e4m3) with a scale for the whole matrix, each row, or each block of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.quantization.quant_weight import bytes_of, working_dtype


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """``w[o, k] = data[o, k] * scale[o // rows, k // columns]``; blocks at the edges may be cut."""

    data: torch.Tensor  # [..., out, in] float8_e4m3fn
    scale: torch.Tensor  # [..., ceil(out / rows), ceil(in / columns)] in the checkpoint's dtype
    block: tuple[int, int]  # rows, columns
    input_scale: torch.Tensor | None = None  # [...] of activations, where the checkpoint has a fixed one

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def packed_bytes(self) -> int:
        return bytes_of(self.data, self.scale)

    def describe(self) -> str:
        out, columns = self.shape[-2:]
        if self.block == (out, columns):
            return "fp8 with one scale"
        if self.block == (1, columns):
            return "fp8 with a scale a row"
        return f"fp8 in blocks of {self.block[0]} x {self.block[1]}"

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        work = working_dtype(dtype)
        scale = self.scale.to(work)
        for dim, size in zip((-2, -1), self.block, strict=True):
            if scale.shape[dim] > 1 and size > 1:
                scale = scale.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
        return self.data.to(work).mul_(scale).to(dtype)

    def with_rows(self, rows: torch.Tensor) -> Fp8Weight | None:
        """Rows may change places within a block, or where each has a scale of its own."""
        scale, height = self.scale, self.block[0]
        if height == 1 and scale.shape[-2] > 1:
            scale = scale.index_select(-2, rows)
        elif scale.shape[-2] > 1:
            stays = rows // height == torch.arange(len(rows), device=rows.device) // height
            if not bool(stays.all()):
                return None
        data = self.data.view(torch.uint8).index_select(-2, rows).view(self.data.dtype)
        return replace(self, data=data, scale=scale)
