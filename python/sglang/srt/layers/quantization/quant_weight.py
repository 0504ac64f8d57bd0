"""What a quantised weight is, whatever its format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeVar, cast

import torch


class QuantWeight(Protocol):
    """The matrix of one linear layer, [out, in], as the checkpoint packs it; or of many, [E, out, in].

    Only weights are quantised: activations keep the run's dtype, also where a checkpoint was made for
    quantised ones.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that it stands for."""
        ...

    @property
    def packed_bytes(self) -> int: ...

    def describe(self) -> str:
        """The format, for a log line."""
        ...

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix. Each value is the product that the format defines, rounded once to ``dtype`` (once
        to float32 and once more where that is narrower)."""
        ...

    def with_rows(self, rows: torch.Tensor) -> QuantWeight | None:
        """The matrix whose rows are those of ``rows`` [out] int64, a permutation; None: it would tear what
        is packed together."""
        ...


W = TypeVar("W", bound=QuantWeight)


def stack(weights: Sequence[W]) -> W:
    """Matrices of one shape and format, side by side: tensors get a dimension in front."""
    first = weights[0]
    if any(w.shape != first.shape or w.describe() != first.describe() for w in weights):
        raise ValueError("only weights of one shape and format can be stacked")
    stacked: dict[str, torch.Tensor] = {}
    frozen = cast(Any, first)  # every format is a frozen dataclass
    for field in fields(frozen):
        parts = [getattr(weight, field.name) for weight in weights]
        if any(isinstance(part, torch.Tensor) for part in parts):
            stacked[field.name] = torch.stack(parts)
    return cast(W, replace(frozen, **stacked))


def bytes_of(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which products are computed: ``dtype``, but at least float32."""
    return torch.promote_types(dtype, torch.float32)
