"""Products with packed matrices: kernels against the definition, compiled at real sizes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from helpers.expert_matrices import meta_matrix, random_matrix

from sgl_kernel.linear.packed import op
from sgl_kernel.linear.packed.op import (
    PackedMatrix,
    dequantise_launch,
    dequantised,
    packed_launches,
    packed_linear,
    packed_linear_ref,
)
from sgl_kernel.moe.weights import Format
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret

INT4, NVFP4, FP8 = Format.INT4, Format.NVFP4, Format.FP8


def body_products() -> None:
    for form, rows, columns, parts, block, gated, tokens in (
        (INT4, 40, 64, 1, (0, 0), False, 3), (NVFP4, 64, 32, 2, (0, 0), True, 2),
        (NVFP4, 32, 32, 2, (0, 0), False, 2), (FP8, 72, 128, 1, (32, 64), False, 9),
        (FP8, 80, 64, 2, (32, 64), True, 2), (FP8, 33, 48, 1, (1, 10**6), False, 1),
    ):  # fmt: skip
        matrix = random_matrix(form, 1, rows, columns, seed=rows, parts=parts, block=block)
        weight = PackedMatrix.make(matrix)
        x = torch.randn(tokens, columns + 8, generator=torch.Generator().manual_seed(1))[:, :columns]
        torch.testing.assert_close(dequantised(weight, torch.float32), matrix.dequantise(0, torch.float32))
        got, expected = packed_linear(x, weight, gated=gated), packed_linear_ref(x, matrix, gated)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert not weight.counters.any()
    many = torch.randn(op.MAX_PACKED_ROWS + 1, 48)
    torch.testing.assert_close(packed_linear(many, weight), packed_linear_ref(many, matrix, False))


def test_kernels_equal_the_definition() -> None:
    interpret(__file__, "body_products")


@pytest.mark.long
@pytest.mark.parametrize("form", [INT4, NVFP4, FP8], ids=lambda form: form.value)
def test_real_sizes_fit(form: Format) -> None:
    """Qwen3-32B's gate and up, and down."""
    for rows, columns, parts in ((2 * 25600, 5120, 2), (5120, 25600, 1)):
        weight = PackedMatrix.make(meta_matrix(form, 1, rows, columns, parts))
        for tokens in (1, 16, 64):
            x = torch.empty(tokens, columns, dtype=torch.bfloat16, device="meta")
            out = torch.empty(tokens, rows // parts, dtype=torch.bfloat16, device="meta")
            for launch in packed_launches(x, weight, out, parts == 2, True):
                check(launch)
        check(dequantise_launch(weight, torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")))
