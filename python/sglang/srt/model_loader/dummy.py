"""Random weights (``--load-format dummy``): right shapes, sensible scale, the same on every run."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import torch

from sglang.srt.model_loader.weight_source import Part, widened


class DummySource:
    """Every tensor depends on its name and ``seed`` alone, not on the order in which it is taken."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        self.dtype = dtype
        self.device = torch.device(device)
        self.seed = seed

    def has(self, name: str) -> bool:
        return False

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        """Matrices keep the size of what goes through them; norms are 1, biases small.

        Where they are wanted ``wide``, they are numbers of the usual dtype all the same, as in checkpoints.
        """
        whole = self._draw(name, shape, self.dtype)
        whole = whole.to(widened(self.dtype)) if wide else whole
        return whole if part is None else part.of(whole).clone()

    def _draw(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        if name.endswith("bias"):
            scale = 0.02
        elif len(shape) == 1:
            return torch.ones(*shape, dtype=dtype, device=self.device)
        else:
            scale = float(shape[-1]) ** -0.5
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + self.seed)
        drawn = torch.empty(*shape, dtype=dtype, device=self.device)
        return drawn.normal_(0.0, scale, generator=generator)

    def take_packed(self, name: str, shape: Sequence[int], part: Part | None = None) -> None:
        return None

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device=self.device)

    def side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        for call in calls:
            call()

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        return None
