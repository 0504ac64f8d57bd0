"""Packed weights of many experts as the one tensor that kernels read (``sgl_kernel.moe.weights``).

It is allocated once and filled expert by expert: there is never a second copy of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from sgl_kernel.moe.weights import GROUP, MXFP4_LARGEST, ExpertMatrix, Format
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.fp8_weight import Fp8Weight
from sglang.srt.layers.quantization.int_weight import IntWeight
from sglang.srt.layers.quantization.quant_weight import QuantWeight

_COLUMNS_OF_FLOAT8: Final = 64
"""Blocks of fewer columns than a pass of the kernel's have no kernel."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the matrices of a stack have in common."""

    format: Format
    dtype: torch.dtype  # PLAIN: of the weights; else of the scales
    # FP8: rows and columns that share a scale. 0 rows: all of a part; 0 columns: all.
    block: tuple[int, int] = (0, 0)


def layout_of(weight: QuantWeight | torch.Tensor) -> Layout | None:
    """Of a stack that can hold this weight as it is packed; None: no kernel reads it."""
    if isinstance(weight, torch.Tensor):
        return Layout(Format.PLAIN, weight.dtype)
    if isinstance(weight, IntWeight):
        whole_groups = weight.group_size % GROUP[Format.INT4] == 0 and weight.in_features % 32 == 0
        has_kernel = weight.bits == 4 and weight.zero is None and weight.group_of is None and whole_groups
        return Layout(Format.INT4, weight.scale.dtype) if has_kernel else None
    if isinstance(weight, Fp4Weight):
        has_kernel = weight.global_scale is not None and weight.shape[-1] % 32 == 0
        return Layout(Format.NVFP4, weight.scale.dtype) if has_kernel else None
    if isinstance(weight, Fp8Weight):
        (rows, columns), in_features = weight.block, weight.shape[-1]
        columns = 0 if columns >= in_features else columns
        if columns % _COLUMNS_OF_FLOAT8:
            return None
        return Layout(Format.FP8, torch.float32, (0 if weight.scale.shape[0] == 1 else rows, columns))
    return None


def as_mxfp4(weight: Fp4Weight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Words [E, N, K / 8] int32 and scales [E, N, K / 32] uint8 of all experts; None: there are scales that
    no kernel holds."""
    scale = weight.scale.view(torch.uint8)
    if bool((scale > MXFP4_LARGEST).any()):
        return None
    return weight.packed.contiguous().view(torch.int32), scale


class ExpertStack:
    """Matrices of ``num_experts`` experts, each of one or two parts (gate and up) one below the other."""

    def __init__(
        self,
        layout: Layout,
        num_experts: int,
        parts: int,
        part_size: tuple[int, int],  # rows and columns of a part
        device: torch.device,
    ) -> None:
        self.layout = layout
        self._rows, self._columns = part_size
        self._parts = parts
        size = (num_experts, parts * self._rows)
        self._global: torch.Tensor | None = None
        self._scale: torch.Tensor | None = None
        self._input: torch.Tensor | None = None  # 0: it is not known
        self._block = (layout.block[0] or self._rows, layout.block[1] or self._columns)
        form = layout.format
        if form is Format.PLAIN:
            self._data = torch.zeros(*size, self._columns, dtype=layout.dtype, device=device)
            return
        if form is Format.FP8:
            self._data = torch.zeros(*size, self._columns, dtype=torch.float8_e4m3fn, device=device)
            blocks = (-(-self._rows // self._block[0]), -(-self._columns // self._block[1]))
            self._scale = torch.zeros(num_experts, parts * blocks[0], blocks[1], device=device)
            return
        self._data = torch.zeros(*size, self._columns // 8, dtype=torch.int32, device=device)
        groups = (*size, self._columns // GROUP[form])
        self._scale = torch.zeros(groups, dtype=layout.dtype, device=device)
        if form is Format.NVFP4:
            self._global = torch.zeros(num_experts, parts, dtype=torch.float32, device=device)
            self._input = torch.zeros_like(self._global)

    def put(self, expert: int, part: int, weight: QuantWeight | torch.Tensor) -> None:
        """Copy it to its place.

        Raises:
            ValueError: it is of another format than the first one.
        """
        if layout_of(weight) != self.layout:
            found = "not quantised" if isinstance(weight, torch.Tensor) else weight.describe()
            raise ValueError(f"{found}, where other experts of the layer are {self.layout.format.value}")
        if isinstance(weight, torch.Tensor):
            self._of_part(self._data, expert, part).copy_(weight)
        elif isinstance(weight, IntWeight):
            self._of_part(self._data, expert, part).copy_(weight.packed)
            repeats = weight.group_size // GROUP[Format.INT4]  # larger groups: their scale several times
            self._put_scale(expert, part, weight.scale.repeat_interleave(repeats, dim=1))
        elif isinstance(weight, Fp4Weight):
            self._of_part(self._data, expert, part).copy_(weight.packed.contiguous().view(torch.int32))
            self._put_scale(expert, part, weight.scale)
            assert self._global is not None and weight.global_scale is not None
            own = weight.global_scale.float()
            self._global[expert, part] = 1 / own if weight.global_divides else own
            if weight.activation_scale is not None:
                assert self._input is not None
                self._input[expert, part] = weight.activation_scale
        elif isinstance(weight, Fp8Weight):
            self._of_part(self._data, expert, part).copy_(weight.data)
            self._put_scale(expert, part, weight.scale)

    def matrix(self) -> ExpertMatrix:
        if self.layout.format is Format.FP8:
            return ExpertMatrix(Format.FP8, self._data, self._scale, block=self._block, parts=self._parts)
        given = self._input if self._input is not None and bool((self._input > 0).all()) else None
        return ExpertMatrix(self.layout.format, self._data, self._scale, self._global, input_scale=given)

    def _put_scale(self, expert: int, part: int, scale: torch.Tensor) -> None:
        assert self._scale is not None
        self._of_part(self._scale, expert, part).copy_(scale)

    def _of_part(self, stacked: torch.Tensor, expert: int, part: int) -> torch.Tensor:
        """stacked: [E, parts * rows, columns] -> a view [rows, columns]."""
        rows = stacked.shape[1] * self._rows // self._data.shape[1]
        return stacked[expert, part * rows : (part + 1) * rows]
