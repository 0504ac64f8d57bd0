"""A linear layer whose weights stay as the checkpoint packs them, over sgl_kernel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sgl_kernel.activation.ops import silu_and_mul
from sgl_kernel.fp4.flashinfer import FlashInferFp4
from sgl_kernel.fp4.weights import Fp4Matrix, matrix_for_products
from sgl_kernel.linear.packed.op import PackedMatrix, packed_linear
from sgl_kernel.moe.weights import ExpertMatrix
from sglang.srt.distributed.tensor_parallel import Join
from sglang.srt.layers.kernel_linear import KernelChoices
from sglang.srt.layers.linear import Linear
from sglang.srt.layers.norm import RMSNorm

MAX_PDL_ROWS = 32
"""Up to so many rows launches overlap with the kernel ahead."""


@dataclass(frozen=True, slots=True)
class _Fp4Products:
    flashinfer: FlashInferFp4
    matrix: Fp4Matrix


class PackedLinear(Linear):
    """``Linear``: fewer bytes than a dequantised one, more launches (norm, order of columns, product, sum).

    There is nothing to choose between, so it is not tuned.
    """

    def __init__(
        self, matrix: ExpertMatrix, bias: torch.Tensor | None = None, *, join: Join | None = None
    ) -> None:
        super().__init__(matrix.data[0], bias, pack=False, join=join)
        self.in_features = matrix.columns
        self.weight_bytes = matrix.weight_bytes
        self._matrix: PackedMatrix | _Fp4Products = PackedMatrix.make(matrix)

    @property
    def matrix(self) -> ExpertMatrix | None:
        """As the checkpoint packs it; None: it has been made ready for inputs in 4 bits."""
        return self._matrix.matrix if isinstance(self._matrix, PackedMatrix) else None

    def use_fp4_inputs(self, flashinfer: FlashInferFp4) -> None:
        """Multiply in 4 bits on both sides from now on; of a matrix that can (``why_not``)."""
        assert self.matrix is not None
        self._matrix = _Fp4Products(flashinfer, matrix_for_products(self.matrix))

    def use_kernels(self, choices: KernelChoices) -> None:
        """It does already."""

    def gated(self, x: torch.Tensor, *, norm: RMSNorm | None = None) -> torch.Tensor:
        if self.bias is not None:
            return super().gated(x, norm=norm)
        return self._packed(x if norm is None else norm(x), gated=True)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        out = self._packed(x, gated=False)
        bias = self.bias if self._join is None else None
        return out if bias is None else out.add_(bias)

    def _packed(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        rows = x.flatten(0, -2)
        pdl = len(rows) <= MAX_PDL_ROWS
        if isinstance(self._matrix, _Fp4Products):
            out = self._matrix.flashinfer.linear(rows, self._matrix.matrix)
            out = silu_and_mul(out, pdl=pdl) if gated else out
        else:
            out = packed_linear(rows, self._matrix, gated=gated, pdl=pdl)
        return out.view(*x.shape[:-1], out.shape[1])
