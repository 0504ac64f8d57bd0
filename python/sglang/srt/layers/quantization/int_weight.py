"""4- and 8-bit integers with a scale (and a zero point) for each group of input columns.

One form for compressed-tensors, GPTQ and AWQ, so that a kernel needs to know one. Words lie along the
input columns, first column in the lowest bits. (GPTQ's are that, transposed; AWQ's are packed anew.)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sglang.srt.layers.quantization.packing import pack_words, unpack_words
from sglang.srt.layers.quantization.quant_weight import bytes_of, working_dtype

_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Nibble of an AWQ word -> where it comes from: column ``i`` of eight lies in nibble ``_AWQ_ORDER[i]``."""


@dataclass(frozen=True, slots=True)
class IntWeight:
    """``w[o, k] = (q[o, k] - zero[o, g]) * scale[o, g]`` with g the group of column k."""

    packed: torch.Tensor  # [..., out, words] int32, q from 0 to 2 ** bits - 1
    scale: torch.Tensor  # [..., out, G] in the checkpoint's dtype
    zero: torch.Tensor | None  # [..., out, G] uint8; None: 2 ** (bits - 1)
    group_of: torch.Tensor | None  # [..., in] int32, group of each column; None: they are in order
    bits: int
    in_features: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.packed.shape[:-1], self.in_features)

    @property
    def group_size(self) -> int:
        return self.in_features // self.scale.shape[-1]

    @property
    def packed_bytes(self) -> int:
        return bytes_of(self.packed, self.scale, self.zero, self.group_of)

    def describe(self) -> str:
        zero = "" if self.zero is None else " with zero points"
        order = "" if self.group_of is None else " in the order of activations"
        return f"int{self.bits} in groups of {self.group_size}{zero}{order}"

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        work = working_dtype(dtype)
        q = unpack_words(self.packed, self.bits, self.in_features).to(work)  # [..., out, in]
        q -= 2 ** (self.bits - 1) if self.zero is None else self._by_column(self.zero.to(work))
        return q.mul_(self._by_column(self.scale.to(work))).to(dtype)

    def with_rows(self, rows: torch.Tensor) -> IntWeight:
        zero = None if self.zero is None else self.zero.index_select(-2, rows)
        packed, scale = (t.index_select(-2, rows) for t in (self.packed, self.scale))
        return replace(self, packed=packed, scale=scale, zero=zero)

    def _by_column(self, of_groups: torch.Tensor) -> torch.Tensor:
        """[..., out, G] -> [..., out, in], or [..., out, 1] where all columns are one group."""
        if self.group_of is not None:
            return torch.take_along_dim(of_groups, self.group_of[..., None, :].long(), dim=-1)
        if of_groups.shape[-1] == 1:
            return of_groups
        return of_groups.repeat_interleave(self.group_size, dim=-1)


def from_gptq(
    qweight: torch.Tensor,  # [in * bits / 32, out] int32
    scales: torch.Tensor,  # [G, out]
    qzeros: torch.Tensor,  # [G, out * bits / 32] int32
    g_idx: torch.Tensor | None,  # [in] int32
    bits: int,
    zeros_less_one: bool,
) -> IntWeight:
    """``zeros_less_one``: files of the first version hold zero points minus one (modulo 2 ** bits)."""
    in_features, out = qweight.shape[0] * 32 // bits, qweight.shape[1]
    zero = unpack_words(qzeros, bits, out)
    if zeros_less_one:
        zero = (zero + 1) & (2**bits - 1)
    return IntWeight(
        packed=qweight.t().contiguous(),
        scale=scales.t().contiguous(),
        zero=_unless_middle(zero.t().contiguous(), bits),
        group_of=_unless_in_order(g_idx, scales.shape[0]),
        bits=bits,
        in_features=in_features,
    )


def from_awq(
    qweight: torch.Tensor,  # [in, out / 8] int32
    scales: torch.Tensor,  # [G, out]
    qzeros: torch.Tensor | None,  # [G, out / 8] int32
) -> IntWeight:
    """The layout of AWQ's GEMM kernels, 4 bits."""
    zero = None if qzeros is None else _unless_middle(_columns_of_awq(qzeros).t().contiguous(), 4)
    return IntWeight(
        packed=pack_words(_columns_of_awq(qweight).t(), 4),
        scale=scales.t().contiguous(),
        zero=zero,
        group_of=None,
        bits=4,
        in_features=qweight.shape[0],
    )


def from_int8(
    weight: torch.Tensor,  # [out, in] int8
    scale: torch.Tensor,  # [out, G]
    zero: torch.Tensor | None,  # [out, G] int8
) -> IntWeight:
    """compressed-tensors' int-quantized: signed bytes. What counts from -128 here counts from 0 there."""
    return IntWeight(
        packed=pack_words(_unsigned(weight), 8),
        scale=scale,
        zero=None if zero is None else _unless_middle(_unsigned(zero), 8),
        group_of=None,
        bits=8,
        in_features=weight.shape[1],
    )


def _unsigned(values: torch.Tensor) -> torch.Tensor:
    """int8 -> uint8, 128 more."""
    return values.view(torch.uint8) ^ 0x80


def _columns_of_awq(words: torch.Tensor) -> torch.Tensor:
    """[rows, out / 8] int32 -> [rows, out] uint8 in the order of the columns."""
    nibbles = unpack_words(words, 4, words.shape[1] * 8).unflatten(-1, (-1, 8))
    return nibbles[..., _AWQ_ORDER].flatten(-2)


def _unless_middle(zero: torch.Tensor, bits: int) -> torch.Tensor | None:
    """None where the zero points say nothing: a symmetric checkpoint's are all the middle."""
    return None if bool((zero == 2 ** (bits - 1)).all()) else zero


def _unless_in_order(g_idx: torch.Tensor | None, num_groups: int) -> torch.Tensor | None:
    """None where columns are in the order of their groups, as most checkpoints have them."""
    if g_idx is None:
        return None
    in_order = torch.arange(len(g_idx), device=g_idx.device) // (len(g_idx) // num_groups)
    return None if bool((g_idx == in_order).all()) else g_idx
