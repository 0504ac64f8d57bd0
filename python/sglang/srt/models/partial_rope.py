"""Heads that are turned in part, in an order in which kernels may turn them whole.

A rope pairs dimension i with the one half of its width further on. Where only the first R of D dimensions
are turned (GLM-4.5: 64 of 128), the partners are R / 2 apart; the kernels take them D / 2 apart. So q and k
of a head get another order as they are loaded, in which the partners are, and the tables get a cosine of 1
and a sine of 0 for the dimensions that stay. q and k change alike, so no score does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.weight_source import Part, WeightSource
from sglang.srt.models import packed

_OF_HEADS: Final = (
    "self_attn.q_proj.weight", "self_attn.q_proj.bias", "self_attn.q_norm.weight",
    "self_attn.k_proj.weight", "self_attn.k_proj.bias", "self_attn.k_norm.weight",
)  # fmt: skip
"""How the names of tensors end whose first dimension is heads of q or k, or one head."""


def order_of_dims(turned: int, head_dim: int) -> list[int]:
    """Where each dimension of a head comes from."""
    half, stay = turned // 2, (head_dim - turned) // 2
    first, second = range(half), range(half, turned)
    return [*first, *range(turned, turned + stay), *second, *range(turned + stay, head_dim)]


def turns_part(config: ModelConfig, device: torch.device | str) -> bool:
    """Whether heads need that order."""
    part_of_head = config.rope.turned(config.head_dim) < config.head_dim
    return part_of_head and packed.wants_kernels(torch.device(device))


def in_order_of_kernels(source: WeightSource, config: ModelConfig) -> WeightSource:
    """``source``, with the heads' dimensions in the order that the kernels on its device want."""
    if not turns_part(config, source.device):
        return source
    order = order_of_dims(config.rope.turned(config.head_dim), config.head_dim)
    return ReorderedHeads(source, torch.tensor(order, device=source.device))


class ReorderedHeads:
    """A source (``WeightSource``) whose q and k heads have their dimensions in another order."""

    def __init__(self, source: WeightSource, order: torch.Tensor) -> None:
        """order: [D] int64, where each dimension of a head comes from."""
        self._source = source
        self._order = order

    @property
    def device(self) -> torch.device:
        return self._source.device

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        tensor = self._source.take(name, shape, wide=wide, part=part)
        return tensor[self._rows(tensor.shape[0])] if name.endswith(_OF_HEADS) else tensor

    def take_packed(self, name: str, shape: Sequence[int], part: Part | None = None) -> QuantWeight | None:
        """None, too, where rows of a block would get into another one: then ``take`` it."""
        weight = self._source.take_packed(name, shape, part)
        if weight is None or not name.endswith(_OF_HEADS):
            return weight
        return weight.with_rows(self._rows(weight.shape[-2]))

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        return self._source.take_integers(name, size)

    def side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        self._source.side_by_side(calls)

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        self._source.finish(ignorable)

    def _rows(self, num_rows: int) -> torch.Tensor:
        """[num_rows] int64 of whole heads."""
        size = len(self._order)
        assert num_rows % size == 0, f"{num_rows} rows are not whole heads of {size}"
        heads = torch.arange(0, num_rows, size, device=self._order.device)
        return (heads[:, None] + self._order).flatten()
