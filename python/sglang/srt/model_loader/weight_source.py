"""Where a model takes its tensors from, and the ledger that makes every mismatch one error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Protocol

import torch

from sglang.srt.distributed.shares import Span
from sglang.srt.layers.quantization.quant_weight import QuantWeight

_MAX_NAMED = 100  # names of one kind in a message; a wholly different checkpoint has thousands


class WeightError(ValueError):
    """A checkpoint can't be used; the message is one line for the user and names the file or tensors."""


@dataclass(frozen=True, slots=True)
class Part:
    """Of a tensor: some indices of one dimension."""

    dim: int
    span: Span

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A view."""
        return tensor.narrow(self.dim, self.span.begin, self.span.size)

    def index(self) -> tuple[Any, ...]:
        return (slice(None),) * self.dim + (slice(self.span.begin, self.span.end),)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.span.size, *whole[self.dim + 1 :])

    def is_whole(self, shape: Sequence[int]) -> bool:
        return self.span.size == shape[self.dim]


class WeightSource(Protocol):
    """A model takes each of its tensors once, then calls ``finish``.

    A tensor that is missing or has another shape is recorded and answered with zeros, so that the
    one error of ``finish`` names all of them.
    """

    @property
    def device(self) -> torch.device:
        """Where tensors are wanted."""
        ...

    def has(self, name: str) -> bool:
        """Whether the checkpoint has this tensor (a dummy source: False, it has no names)."""
        ...

    def take(
        self, name: str, shape: Sequence[int], *, wide: bool = False, part: Part | None = None
    ) -> torch.Tensor:
        """Tensor ``name`` of ``shape``, in the wanted dtype on the wanted device.

        ``wide``: in float32 if the wanted dtype is narrower (what decides must not be rounded).
        ``part``: that part of it alone; ``shape`` is of the whole.
        """
        ...

    def take_packed(self, name: str, shape: Sequence[int], part: Part | None = None) -> QuantWeight | None:
        """Weight ``name`` of ``shape`` [out, in] in the form in which the checkpoint packs it, on the wanted
        device; ``part``: that part of it alone. None: it is not packed (then ``take`` it), or a mismatch
        that is recorded. GPT-OSS's experts have a shape of [E, in, out], and are packed as [E, out, in].

        Raises:
            WeightError: the part cuts through a group, a block or a word.
        """
        ...

    def take_integers(self, name: str, size: int) -> torch.Tensor:
        """[size] int64 tensor ``name``; zeros from a dummy source."""
        ...

    def side_by_side(self, calls: Sequence[Callable[[], None]]) -> None:
        """Carry out calls that take tensors and put them in their places, several at a time.

        Each uses up what it takes: on a device it must not be kept, only copied. The places are there before.
        """
        ...

    def finish(self, ignorable: Sequence[str] = ()) -> None:
        """Check the ledger. Names that match an ``ignorable`` pattern (fnmatch) may be left over.

        Raises:
            WeightError: missing, unexpected or wrongly shaped tensors, all of them named.
        """
        ...


def everything_but(prefix: str) -> tuple[str, ...]:
    """Patterns (fnmatch) of all names that differ from ``prefix`` in one of its characters."""
    return tuple(f"{prefix[:i]}[!{character}]*" for i, character in enumerate(prefix))


def widened(dtype: torch.dtype) -> torch.dtype:
    """float32, or the dtype if it is wider."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(slots=True)
class Ledger:
    """What was asked of a checkpoint, and what was wrong."""

    where: str
    taken: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    wrong_shape: list[str] = field(default_factory=list)
    wrong_format: list[str] = field(default_factory=list)  # quantised otherwise than the config says

    def check(self, present: Iterable[str], ignorable: Sequence[str]) -> None:
        unexpected = [
            name
            for name in sorted(present)
            if name not in self.taken and not any(fnmatchcase(name, pattern) for pattern in ignorable)
        ]
        problems = [
            f"{title} {_names(sorted(names))}"
            for title, names in (
                ("missing:", self.missing),
                ("unexpected:", unexpected),
                ("of another shape:", self.wrong_shape),
                ("quantised otherwise than the config says:", self.wrong_format),
            )
            if names
        ]
        if problems:
            raise WeightError(f"tensors of {self.where} don't fit the model; {'; '.join(problems)}")


def _names(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more
