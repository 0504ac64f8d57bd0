"""The stored tensors of one quantised module, or those of one rank's part of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch

from sglang.srt.configs.quant_config import WeightScheme
from sglang.srt.distributed.shares import Span
from sglang.srt.model_loader.weight_source import Ledger, Part

Shape = tuple[int, ...]

Along = tuple[int, int]
"""A dimension of a stored tensor, and how many rows (or columns) of the matrix one of its places is for."""

FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class StoredTensors(Protocol):
    """A checkpoint as it lies in its files."""

    ledger: Ledger

    def stored(self, name: str) -> tuple[torch.dtype, Shape] | None: ...

    def take_stored(
        self, name: str, shape: Sequence[int], part: Part | None = None
    ) -> torch.Tensor | None: ...


class Module:
    """What is wrong with the tensors goes to the ledger. Shapes in the files are always of the whole.

    ``part``: of the matrix [out, in]; what is stored is cut where it lies, in whole groups and words.
    """

    def __init__(
        self, source: StoredTensors, name: str, out: int, in_features: int, part: Part | None = None
    ) -> None:
        self.source, self.name, self.part = source, name, part
        self.out, self.in_features = out, in_features
        self.rows, self.columns = (out, in_features) if part is None else part.shape((out, in_features))

    def dtype(self, suffix: str) -> torch.dtype | None:
        stored = self.source.stored(f"{self.name}.{suffix}")
        return None if stored is None else stored[0]

    def take(
        self,
        suffix: str,
        dtypes: Sequence[torch.dtype],
        *shapes: Shape,
        rows: Along | None = None,
        columns: Along | None = None,
    ) -> torch.Tensor | None:
        """A tensor of one of the shapes and dtypes; ``rows``, ``columns``: where it follows the matrix's."""
        name = f"{self.name}.{suffix}"
        stored = self.source.stored(name)
        shape = stored[1] if stored is not None and stored[1] in shapes else shapes[0]
        found = self.source.take_stored(name, shape, self._part_of(shape, rows, columns))
        if found is not None and found.dtype not in dtypes:
            self.wrong(f".{suffix} is {found.dtype}, not {' or '.join(map(str, dtypes))}")
            return None
        return found

    def _part_of(self, stored: Shape, rows: Along | None, columns: Along | None) -> Part | None:
        if self.part is None:
            return None
        along = columns if self.part.dim else rows
        if along is None or along[0] >= len(stored) or stored[along[0]] == 1:
            return None  # the same for every part
        dim, each = along
        return Part(dim, Span(self.part.span.begin // each, -(-self.part.span.end // each)))

    def take_if_there(
        self,
        suffix: str,
        dtypes: Sequence[torch.dtype],
        *shapes: Shape,
        rows: Along | None = None,
        columns: Along | None = None,
    ) -> torch.Tensor | None:
        if self.dtype(suffix) is None:
            return None
        return self.take(suffix, dtypes, *shapes, rows=rows, columns=columns)

    def take_scalar(self, suffix: str) -> torch.Tensor | None:
        """[] one number, where it is there."""
        found = self.take_if_there(suffix, FLOATS, (), (1,))
        return None if found is None else found.reshape(())

    def wrong(self, what: str) -> None:
        self.source.ledger.wrong_format.append(f"{self.name}{what}")

    def num_groups(self, scheme: WeightScheme) -> int | None:
        """Scales of a row of the whole; None: the groups don't fit."""
        if scheme.strategy != "group":
            return 1
        if self.in_features % scheme.group_size:
            self.wrong(f" has {self.in_features} columns, no multiple of the groups of {scheme.group_size}")
            return None
        return self.in_features // scheme.group_size

    def own_groups(self, scheme: WeightScheme) -> int:
        """Scales of a row of the part."""
        return self.columns // scheme.group_size if scheme.strategy == "group" else 1
