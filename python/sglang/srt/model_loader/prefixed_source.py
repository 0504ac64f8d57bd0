"""A model inside another one's checkpoint: the same names behind a prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from sglang.srt.layers.quantization.quant_weight import QuantWeight
from sglang.srt.model_loader.weight_source import Part, WeightSource


class PrefixedSource:
    """``beside``: patterns of tensors that are the rest of the whole model's, which nobody takes."""

    def __init__(self, source: WeightSource, prefix: str, beside: Sequence[str]) -> None:
        self._source = source
        self._prefix = prefix
        self._beside = tuple(beside)

    @property
    def device(self) -> torch.device:
        return self._source.device

    def has(self, name: str) -> bool:
        return self._source.has(self._prefix + name)

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        return self._source.take(self._prefix + name, shape, wide=wide, part=part)

    def take_packed(self, name: str, shape: Sequence[int], part: Part | None = None) -> QuantWeight | None:
        return self._source.take_packed(self._prefix + name, shape, part)

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        return self._source.take_integers(self._prefix + name, size)

    def side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        self._source.side_by_side(calls)

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        own = [pattern if pattern.startswith("*") else self._prefix + pattern for pattern in ignorable]
        self._source.finish((*own, *self._beside))
