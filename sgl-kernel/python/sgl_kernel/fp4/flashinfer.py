"""Products with both sides in NVFP4 by FlashInfer, called so that a CUDA graph can hold them.

Nothing is read back. What FlashInfer allocates in a call comes out of PyTorch's allocator, and so out of a
graph's memory; its workspaces are made before: that of matrices by the first call, that of experts here. No
kernel is chosen by timing (FlashInfer's autotuner is never entered), and what CUTLASS takes then does not go
by the number of rows.
"""

from __future__ import annotations

import importlib
from typing import Any, Final

import torch

from sgl_kernel.flashinfer_package import PACKAGE, VERSION, FlashInferError, find_flashinfer
from sgl_kernel.fp4.weights import Fp4Experts, Fp4Matrix

MAX_TOKENS: Final = 2048
"""Of a pass through a layer's experts: for what lies between their products there is memory of this size."""

MAJORS: Final = (10, 12)
"""Compute capabilities that have products of two NVFP4 matrices: SM100 and its kin, SM120 and SM121."""

Codes = tuple[torch.Tensor, torch.Tensor]
"""[T, K / 2] uint8, and [T, K / 16] scales in whole tiles."""


def check_capability(capability: tuple[int, int], device: str) -> None:
    """
    Raises:
        FlashInferError: the device has no such products.
    """
    major, minor = capability
    if major not in MAJORS:
        raise FlashInferError(
            f"products of two NVFP4 matrices need SM100 or SM120, and {device} is SM{major}{minor}"
        )


class FlashInferFp4:
    """Its functions. One for a worker."""

    def __init__(self) -> None:
        """
        Raises:
            FlashInferError: the package is missing, or lacks one of the functions.
        """
        package = find_flashinfer()
        try:
            fused_moe = importlib.import_module("flashinfer.fused_moe")
            self._quantize: Any = package.nvfp4_quantize
            self._tiles: Any = package.SfLayout.layout_128x4
            self._matmul: Any = package.mm_fp4
            self._experts: Any = fused_moe.cutlass_fused_moe
            self._workspace_size: Any = fused_moe.cutlass_fused_moe_workspace_size
        except (ImportError, AttributeError) as error:
            raise FlashInferError(
                f"FlashInfer has no NVFP4 products ({error}): pip install {PACKAGE}=={VERSION}"
            ) from error
        self._workspace: torch.Tensor | None = None  # of experts, for all layers: they take turns

    def quantise(self, x: torch.Tensor, by: torch.Tensor) -> Codes:
        """x: [T, K] bfloat16 or float16; by: its global scale, float32."""
        codes, scale = self._quantize(
            x.contiguous(), by, sfLayout=self._tiles, do_shuffle=False, enable_pdl=False
        )
        return codes, scale

    def linear(self, x: torch.Tensor, matrix: Fp4Matrix) -> torch.Tensor:
        """x: [T, K] -> [T, N] of x's type."""
        codes, scale = self.quantise(x, matrix.by)
        parts = [
            self._matmul(
                codes, rows.codes.t(), scale, rows.scale.t(), rows.alpha, x.dtype, backend="cutlass"
            )
            for rows in matrix.parts
        ]  # fmt: skip
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def reserve(self, experts: Fp4Experts, top_k: int, dtype: torch.dtype) -> None:
        """Memory for any number of tokens of a layer with such experts."""
        device = experts.down.device
        size = self._workspace_size(
            MAX_TOKENS, experts.hidden, experts.inner, len(experts.down), top_k,
            x_dtype=torch.uint8, weight_dtype=torch.int64, output_dtype=dtype, use_fused_finalize=False,
            device=device,
        )  # fmt: skip
        if self._workspace is None or self._workspace.numel() < size:
            self._workspace = torch.empty(size, dtype=torch.uint8, device=device)

    def experts(
        self,
        x: torch.Tensor,  # [T, H], normed
        weights: torch.Tensor,  # [T, k] float32
        chosen: torch.Tensor,  # [T, k] int32; negative: none
        layer: Fp4Experts,
    ) -> torch.Tensor:
        """[T, H] of x's type; layer: one that there is memory for."""
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        for begin in range(0, len(x), MAX_TOKENS):
            part = slice(begin, begin + MAX_TOKENS)
            codes, scale = self.quantise(x[part], layer.by.reshape(1))
            self._experts(
                codes,
                chosen[part].to(torch.int32).contiguous(),
                weights[part].to(torch.float32).contiguous(),
                layer.up_gate.view(torch.int64),  # 16 codes each, as FlashInfer knows them by
                layer.down.view(torch.int64),
                x.dtype,
                [
                    layer.by,
                    layer.up_gate_scale.view(torch.int32),
                    layer.up_gate_alpha,
                    layer.down_by,
                    layer.down_scale.view(torch.int32),
                    layer.down_alpha,
                ],
                input_sf=scale,
                output=out[part],
                enable_pdl=False,
                use_fused_finalize=False,  # the fused one adds in an order that changes from run to run
                workspace_buffer=self._workspace,
            )
        return out
