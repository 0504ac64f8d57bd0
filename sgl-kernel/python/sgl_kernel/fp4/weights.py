"""NVFP4 weights as products with inputs in 4 bits want them, and these products in plain PyTorch.

The scales of blocks go to tiles, once; codes stay where they are. A checkpoint has an input scale for every
matrix: what 1 stands for. Matrices with one input take the largest of theirs, which cuts off least.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from sgl_kernel.fp4.layout import in_tiles, padded_size
from sgl_kernel.fp4.reference import BLOCK, fake_quantise
from sgl_kernel.moe.weights import ExpertMatrix, Format

UNIT: Final = 32
"""Rows of a part and columns must be a multiple of it: 16 bytes of codes, which a copy of a tile needs."""


@dataclass(frozen=True, slots=True)
class Fp4Rows:
    """Rows of a matrix that have one scale of the whole."""

    codes: torch.Tensor  # [N, K / 2] uint8
    scale: torch.Tensor  # [N, K / 16] in whole tiles, uint8
    alpha: torch.Tensor  # [1] float32: the scale of the whole times that of the input


@dataclass(frozen=True, slots=True)
class Fp4Matrix:
    parts: tuple[Fp4Rows, ...]  # one below the other
    by: torch.Tensor  # [1] float32: the input's global scale


@dataclass(frozen=True, slots=True)
class Fp4Experts:
    """A layer's experts. The up projection's rows come before the gate's."""

    up_gate: torch.Tensor  # [E, 2 * I, H / 2] uint8
    up_gate_scale: torch.Tensor  # [E, 2 * I, H / 16] in whole tiles, uint8
    up_gate_alpha: torch.Tensor  # [E] float32
    by: torch.Tensor  # [] float32: the input's global scale, for all experts
    down: torch.Tensor  # [E, H, I / 2] uint8
    down_scale: torch.Tensor  # [E, H, I / 16] in whole tiles, uint8
    down_alpha: torch.Tensor  # [E] float32
    down_by: torch.Tensor  # [E] float32: global scales of what lies between an expert's two products

    @property
    def hidden(self) -> int:
        return self.down.shape[1]

    @property
    def inner(self) -> int:
        return self.down.shape[2] * 2


def why_not(matrix: ExpertMatrix) -> str:
    """Why inputs of this matrix can't be in 4 bits; empty: they can."""
    if matrix.format is not Format.NVFP4:
        return f"{matrix.format.value}, not nvfp4"
    if matrix.input_scale is None:
        return "without input scales"
    if matrix.bias is not None:
        return "with biases of its experts"
    rows = matrix.rows // matrix.input_scale.shape[1]  # of a part: gate, up
    if rows % UNIT or matrix.columns % UNIT:
        return f"of {rows} x {matrix.columns}, no multiples of {UNIT}"
    return ""


def why_not_experts(gate_up: ExpertMatrix, down: ExpertMatrix) -> str:
    return why_not(gate_up) or why_not(down)


def matrix_for_products(matrix: ExpertMatrix) -> Fp4Matrix:
    """One matrix (E = 1), of which ``why_not`` is empty. Codes are shared."""
    assert matrix.scale is not None and matrix.global_scale is not None
    whole, by = matrix.global_scale[0], input_scale(matrix)
    if bool((whole == whole[0]).all()):
        whole = whole[:1]
    codes = matrix.data[0].view(torch.uint8).chunk(len(whole))
    scales = matrix.scale[0].view(torch.uint8).chunk(len(whole))
    parts = [
        Fp4Rows(code, in_tiles(scale), (own * by).reshape(1))
        for code, scale, own in zip(codes, scales, whole, strict=True)
    ]
    return Fp4Matrix(tuple(parts), (1 / by).reshape(1))


def experts_for_products(gate_up: ExpertMatrix, down: ExpertMatrix, *, copy: bool = False) -> Fp4Experts:
    """Of matrices of which ``why_not_experts`` is empty. Without ``copy`` the codes of gate and up change
    places in ``gate_up`` itself, which is of no use after that."""
    assert gate_up.global_scale is not None and down.global_scale is not None
    assert down.input_scale is not None
    by = input_scale(gate_up)
    data = gate_up.data.clone() if copy else gate_up.data
    for codes in data:  # one by one: what it takes in between is a copy
        codes.copy_(_up_first(codes))
    given, whole = down.input_scale[:, 0], gate_up.global_scale
    # There is one scale for both, the gate's: up's part is off by a factor, and so is the product of the two,
    # which the global scale by which it is quantised takes back.
    factor = whole[:, -1] / whole[:, 0]
    return Fp4Experts(
        data.view(torch.uint8),
        _tiled(gate_up, up_first=True),
        whole[:, 0] * by,
        1 / by,
        down.data.view(torch.uint8),
        _tiled(down),
        down.global_scale[:, 0] * given,
        factor / given,
    )


def input_scale(matrix: ExpertMatrix) -> torch.Tensor:
    """[] float32: the largest of all parts and experts."""
    assert matrix.input_scale is not None
    return matrix.input_scale.amax()


def _up_first(rows: torch.Tensor) -> torch.Tensor:
    """[2 * I, ...], gate and up -> up and gate."""
    return torch.cat(rows.chunk(2)[::-1])


def _tiled(matrix: ExpertMatrix, up_first: bool = False) -> torch.Tensor:
    assert matrix.scale is not None
    scale = matrix.scale.view(torch.uint8)  # [E, N, K / 16]
    size = padded_size(matrix.rows, matrix.columns // BLOCK)
    tiled = torch.empty(matrix.num_experts, *size, dtype=torch.uint8, device=scale.device)
    for own, place in zip(scale, tiled, strict=True):
        place.copy_(in_tiles(_up_first(own) if up_first else own))
    return tiled


def linear_ref(x: torch.Tensor, matrix: ExpertMatrix, rows: slice = slice(None)) -> torch.Tensor:
    """x: [T, K] -> [T, rows] float32: the dequantised matrix (E = 1) times what stands for x in 4 bits."""
    assert matrix.scale is not None
    own = matrix.dequantise(0, torch.float32)[rows]
    return fake_quantise(x, 1 / input_scale(matrix)) @ own.t()


def experts_ref(
    x: torch.Tensor,  # [T, H], normed
    weights: torch.Tensor,  # [T, k]
    experts: torch.Tensor,  # [T, k]; negative: none
    gate_up: ExpertMatrix,
    down: ExpertMatrix,
) -> torch.Tensor:
    """[T, H] float32; what goes into the down projections is in 4 bits as well."""
    assert down.input_scale is not None
    out = torch.zeros(x.shape, device=x.device)
    given = fake_quantise(x, 1 / input_scale(gate_up))
    for expert in sorted(set(experts[experts >= 0].tolist())):
        token, choice = (experts == expert).nonzero(as_tuple=True)
        gate, up = (given[token] @ gate_up.dequantise(expert, torch.float32).t()).chunk(2, dim=1)
        inner = fake_quantise(F.silu(gate) * up, 1 / down.input_scale[expert, 0])
        part = inner @ down.dequantise(expert, torch.float32).t()
        out.index_add_(0, token, part * weights[token, choice, None].float())
    return out
