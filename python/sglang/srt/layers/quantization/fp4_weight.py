"""4-bit floats (e2m1): NVFP4 and MXFP4."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from sglang.srt.layers.quantization.quant_weight import bytes_of, working_dtype

_VALUES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

GROUP_SIZES: Final = {torch.float8_e4m3fn: 16, torch.float8_e8m0fnu: 32}
"""dtype of the scales -> columns that one serves: NVFP4's and MXFP4's."""


@dataclass(frozen=True, slots=True)
class Fp4Weight:
    """``w[o, k] = e2m1(code[o, k]) * scale[o, g]``, times the matrix's own scale in NVFP4."""

    packed: torch.Tensor  # [..., out, in / 2] uint8, the even column in the low half
    scale: torch.Tensor  # [..., out, in / group size] float8_e4m3fn or float8_e8m0fnu
    global_scale: torch.Tensor | None  # [...] float32; None: MXFP4 has none
    global_divides: bool = False  # compressed-tensors stores the reciprocal: scales are divided by it
    input_scale: torch.Tensor | None = None  # [...] float32, of activations; same meaning

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], 2 * self.packed.shape[-1])

    @property
    def packed_bytes(self) -> int:
        return bytes_of(self.packed, self.scale, self.global_scale)

    def describe(self) -> str:
        return "mxfp4" if self.global_scale is None else "nvfp4"

    @property
    def activation_scale(self) -> torch.Tensor | None:
        """[...] float32: an activation is e2m1 times its block's scale times this. None: it is not known."""
        if self.input_scale is None:
            return None
        own = self.input_scale.float()
        return 1 / own if self.global_divides else own

    def part(self, index: int) -> Fp4Weight:
        """One of several matrices without a scale of their own."""
        assert self.global_scale is None and self.input_scale is None
        return Fp4Weight(self.packed[index], self.scale[index], None)

    def with_rows(self, rows: torch.Tensor) -> Fp4Weight:
        scale = self.scale.view(torch.uint8).index_select(-2, rows).view(self.scale.dtype)
        return replace(self, packed=self.packed.index_select(-2, rows), scale=scale)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        work = working_dtype(dtype)
        values = torch.tensor((*_VALUES, *(-v for v in _VALUES)), dtype=work, device=self.packed.device)
        codes = torch.stack((self.packed & 0xF, self.packed >> 4), dim=-1).flatten(-2)
        scale = self.scale.to(work).repeat_interleave(GROUP_SIZES[self.scale.dtype], dim=-1)
        matrix = values[codes.int()].mul_(scale)  # exact: few bits each
        if self.global_scale is not None:
            own = self.global_scale.to(work)[..., None, None]
            matrix = matrix.div_(own) if self.global_divides else matrix.mul_(own)
        return matrix.to(dtype)
