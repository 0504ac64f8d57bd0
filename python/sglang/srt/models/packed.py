"""Linear layers of a quantised checkpoint that stay packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.distributed.tensor_parallel import Join
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.weight_source import Part, WeightError, WeightSource

if TYPE_CHECKING:
    from sglang.srt.layers.packed_linear import PackedLinear

Wanted = tuple[str, tuple[int, int], Part | None]
"""Name and shape of a weight, and which part of it."""


def wants_kernels(device: torch.device) -> bool:
    """Whether routing, experts and packed weights are sgl_kernel's."""
    return device.type == "cuda"


def take_packed_linear(
    source: WeightSource,
    wanted: Sequence[Wanted],
    bias: torch.Tensor | None,
    *,
    gated: bool,
    join: Join | None,
) -> PackedLinear | None:
    """One linear layer of these parts. None: they are not packed, or no kernel reads them as they are."""
    weights: list[QuantWeight] = []
    for name, shape, part in wanted:
        try:
            weight = source.take_packed(name, shape, part)
        except WeightError:
            return None  # cut through what is packed together: of the dequantised matrix it can be taken
        if weight is None:
            return None
        weights.append(weight)
    from sglang.srt.layers.packed_linear import PackedLinear
    from sglang.srt.layers.quantization.packed_matrix import matrix_of

    matrix = matrix_of(weights, gated)
    return None if matrix is None else PackedLinear(matrix, bias, join=join)
