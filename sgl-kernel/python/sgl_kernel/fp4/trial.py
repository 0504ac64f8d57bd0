"""Does a product in 4 bits on both sides come out right on this device?

Of a layer's own matrices and random inputs, against the reference. Wrong layouts, scales or an order of gate
and up are off by far more than the limits; what is within them is rounding.
"""

from __future__ import annotations

from typing import Final

import torch

from sgl_kernel.fp4.flashinfer import FlashInferFp4
from sgl_kernel.fp4.weights import (
    experts_for_products,
    experts_ref,
    input_scale,
    linear_ref,
    matrix_for_products,
)
from sgl_kernel.moe.weights import ExpertMatrix

ROWS: Final = (1, 2, 5, 16, 33, 64, 130, 512)  # from 130 on: more than a tile of scales
TOKENS: Final = (1, 5, 33)
SAMPLE: Final = 256  # rows at each end of a large matrix that are looked at

LINEAR_LIMIT: Final = 0.02
"""Of a row: relative, root of the mean of squares. Half precision at the end is a tenth of that."""

EXPERTS_LIMIT: Final = 0.2
"""What lies between two products is rounded to half precision before it is quantised: one code in a hundred
is the next one then, a fourth off, which is 0.03 of all, and twice that of a short row."""


def linear_error(flashinfer: FlashInferFp4, matrix: ExpertMatrix, dtype: torch.dtype) -> float:
    """The largest of any row, of several numbers of rows; not finite: so is the result."""
    ready = matrix_for_products(matrix)
    ends = [slice(0, SAMPLE), slice(max(SAMPLE, matrix.rows - SAMPLE), None)]
    errors = []
    for rows in ROWS:
        x = _inputs(rows, matrix, dtype)
        got = flashinfer.linear(x, ready)
        expected = torch.cat([linear_ref(x, matrix, end) for end in ends], dim=1)
        errors.append(_error(torch.cat([got[:, end] for end in ends], dim=1), expected))
    return float(torch.tensor(errors).max())  # Python's max would lose a NaN


def experts_error(
    flashinfer: FlashInferFp4, gate_up: ExpertMatrix, down: ExpertMatrix, top_k: int, dtype: torch.dtype
) -> float:
    """The largest of any token, of a few, the last of which goes to no expert. Takes a copy of the layer."""
    ready = experts_for_products(gate_up, down, copy=True)
    flashinfer.reserve(ready, top_k, dtype)
    g = torch.Generator().manual_seed(1)
    errors = []
    for tokens in TOKENS:
        x = _inputs(tokens, gate_up, dtype)
        orders = [torch.randperm(gate_up.num_experts, generator=g) for _ in range(tokens)]
        chosen = torch.stack([order[:top_k] for order in orders]).to(x.device, torch.int32)
        chosen[-1] = -1 if tokens > 1 else chosen[-1]
        weights = (torch.rand(tokens, top_k, generator=g) + 0.1).to(x.device)
        got = flashinfer.experts(x, weights, chosen, ready)
        errors.append(_error(got, experts_ref(x, weights, chosen, gate_up, down)))
    return float(torch.tensor(errors).max())


def _inputs(rows: int, matrix: ExpertMatrix, dtype: torch.dtype) -> torch.Tensor:
    """[rows, K] that use the range the checkpoint was made for, a little beyond it in places."""
    largest = float(input_scale(matrix)) * 6 * 448
    x = torch.randn(rows, matrix.columns, generator=torch.Generator().manual_seed(rows)) * (largest / 3)
    return x.to(matrix.data.device, dtype)


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest of the rows: root of the mean square of the difference, beside that of what is expected."""
    wrong, size = (got.double() - expected.double()).norm(dim=1), expected.double().norm(dim=1)
    return float(torch.where((size == 0) & (wrong == 0), 0.0, wrong / size).max())
