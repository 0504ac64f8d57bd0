"""Random experts in every format."""

from __future__ import annotations

from dataclasses import replace

import torch

from sgl_kernel.moe.weights import GROUP, MXFP4_LARGEST, ExpertMatrix, Format


def random_matrix(
    form: Format,
    num_experts: int,
    rows: int,
    columns: int,
    seed: int,
    parts: int = 1,
    block: tuple[int, int] = (128, 128),
) -> ExpertMatrix:
    """float32 where it is plain; int4 scales are bfloat16. ``parts``: NVFP4's scales of a matrix, or (2)
    gate and up whose blocks of float8 are counted apart. ``block``: float8's."""
    generator = torch.Generator().manual_seed(seed)
    size = (num_experts, rows, columns)
    if form is Format.PLAIN:
        return ExpertMatrix(form, torch.randn(size, generator=generator))
    if form is Format.FP8:
        data = torch.randn(size, generator=generator).to(torch.float8_e4m3fn)
        blocks = (num_experts, *blocks_of(rows, columns, parts, block))
        return ExpertMatrix(
            form, data, torch.rand(blocks, generator=generator) + 0.2, block=block, parts=parts
        )
    words = torch.randint(-(2**31), 2**31, (*size[:2], columns // 8), generator=generator).to(torch.int32)
    scale = torch.rand(*size[:2], columns // GROUP[form], generator=generator) + 0.2
    if form is Format.INT4:
        return ExpertMatrix(form, words, (scale * 0.2).bfloat16())
    if form is Format.MXFP4:
        exponents = torch.randint(120, MXFP4_LARGEST + 1, scale.shape, generator=generator).to(torch.uint8)
        return ExpertMatrix(form, words, exponents)
    whole = torch.rand(num_experts, parts, generator=generator) + 0.5
    return ExpertMatrix(form, words, scale.to(torch.float8_e4m3fn), whole)


def blocks_of(rows: int, columns: int, parts: int, block: tuple[int, int]) -> tuple[int, int]:
    return parts * -(-rows // (parts * block[0])), -(-columns // block[1])


def meta_matrix(form: Format, num_experts: int, rows: int, columns: int, parts: int = 1) -> ExpertMatrix:
    """Of a real size, without memory."""
    size = (num_experts, rows, columns)
    if form is Format.PLAIN:
        return ExpertMatrix(form, torch.empty(size, dtype=torch.bfloat16, device="meta"))
    if form is Format.FP8:
        block = (128, 128)
        data = torch.empty(size, dtype=torch.float8_e4m3fn, device="meta")
        scale = torch.empty(num_experts, *blocks_of(rows, columns, parts, block), device="meta")
        return ExpertMatrix(form, data, scale, block=block, parts=parts)
    words = torch.empty(*size[:2], columns // 8, dtype=torch.int32, device="meta")
    dtypes = {Format.INT4: torch.bfloat16, Format.NVFP4: torch.float8_e4m3fn, Format.MXFP4: torch.uint8}
    scale = torch.empty(*size[:2], columns // GROUP[form], dtype=dtypes[form], device="meta")
    whole = torch.empty(num_experts, parts, device="meta") if form is Format.NVFP4 else None
    return ExpertMatrix(form, words, scale, whole)


def with_bias(matrix: ExpertMatrix, seed: int, dtype: torch.dtype = torch.float32) -> ExpertMatrix:
    """As GPT-OSS's have. The meta device has no numbers to draw."""
    size = matrix.data.shape[:2]
    if matrix.data.is_meta:
        return replace(matrix, bias=torch.empty(size, dtype=dtype, device="meta"))
    bias = torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return replace(matrix, bias=bias)
