"""One packed matrix out of the packed weights of a linear layer's parts (q, k and v; gate and up)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sgl_kernel.moe.weights import ExpertMatrix, Format
from sglang.srt.layers.quantization.expert_stack import ExpertStack, layout_of
from sglang.srt.layers.quantization.fp4_weight import Fp4Weight
from sglang.srt.layers.quantization.fp8_weight import Fp8Weight
from sglang.srt.layers.quantization.int_weight import IntWeight
from sglang.srt.layers.quantization.quant_weight import QuantWeight


def matrix_of(weights: Sequence[QuantWeight], gated: bool) -> ExpertMatrix | None:
    """[1, rows of all, in]; ``gated``: of gate and up, of equal size. None: no kernel reads it so."""
    if not gated:
        joined = _one_below_the_other(weights)
        if joined is None:
            return None
        weights = [joined]
    layouts = [layout_of(weight) for weight in weights]
    first = layouts[0]
    if first is None or first.format is Format.PLAIN or any(layout != first for layout in layouts):
        return None
    rows, columns = weights[0].shape
    device = _data(weights[0]).device
    stack = ExpertStack(first, 1, len(weights), (rows, columns), device)
    for part, weight in enumerate(weights):
        stack.put(0, part, weight)
    return stack.matrix()


def _data(weight: QuantWeight) -> torch.Tensor:
    assert isinstance(weight, IntWeight | Fp4Weight | Fp8Weight), "what has a layout"
    return weight.data if isinstance(weight, Fp8Weight) else weight.packed


def _one_below_the_other(weights: Sequence[QuantWeight]) -> QuantWeight | None:
    """Their rows as one weight's; None: scales of the whole differ, or a block would have rows of two."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if all(isinstance(w, IntWeight) and layout_of(w) is not None for w in weights):
        ints = [w for w in weights if isinstance(w, IntWeight)]
        if len({(w.bits, w.group_size) for w in ints}) > 1:
            return None
        packed, scale = torch.cat([w.packed for w in ints]), torch.cat([w.scale for w in ints])
        return replace(ints[0], packed=packed, scale=scale)
    if all(isinstance(w, Fp4Weight) and w.global_scale is not None for w in weights):
        fours = [w for w in weights if isinstance(w, Fp4Weight)]
        if len({(float(w.global_scale), w.global_divides) for w in fours if w.global_scale is not None}) > 1:
            return None
        packed, scale = torch.cat([w.packed for w in fours]), torch.cat([w.scale for w in fours])
        return replace(fours[0], packed=packed, scale=scale, input_scale=_widest(fours))
    if all(isinstance(w, Fp8Weight) for w in weights):
        return _float8([w for w in weights if isinstance(w, Fp8Weight)])
    return None


def _widest(weights: Sequence[Fp4Weight]) -> torch.Tensor | None:
    """The input scale of parts that have one input: the largest, which cuts off least."""
    given = [w.input_scale for w in weights if w.input_scale is not None]
    if len(given) < len(weights):
        return None
    scales = torch.stack([scale.reshape(()) for scale in given])
    return scales.amin() if weights[0].global_divides else scales.amax()


def _float8(weights: Sequence[Fp8Weight]) -> Fp8Weight | None:
    columns = weights[0].shape[-1]
    by_rows = [w for w in weights if w.scale.shape[1] == 1 and w.scale.shape[0] in (1, w.shape[0])]
    data = torch.cat([w.data for w in weights])
    if len(by_rows) == len(weights):  # one for a whole matrix is one for each of its rows
        scale = torch.cat([w.scale.float().expand(w.shape[0], 1) for w in weights])
        return Fp8Weight(data, scale, (1, columns))
    block = weights[0].block
    cut = [w for w in weights[:-1] if w.shape[0] % block[0]]
    if cut or any(w.block != block for w in weights):
        return None
    return Fp8Weight(data, torch.cat([w.scale for w in weights]), block)
