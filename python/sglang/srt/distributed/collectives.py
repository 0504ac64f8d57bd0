"""What ranks tell each other: sums and joined parts of tensors.

One interface for every way to do it. A group is an object that is handed to who needs it; torch's own
default group, a global, is not used, so that several groups can live in one process.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist

TIMEOUT: Final = timedelta(hours=1)
"""Longest that one rank may be behind another one: at the start, when each loads its weights. A rank that
dies is noticed at once, by its connections."""


class PeerLostError(RuntimeError):
    """Another rank is gone, or does something else: this one is not to blame."""


class Norm(Protocol):
    """An RMS norm: ``x / rms(x) * weight`` of rows [..., H]."""

    weight: torch.Tensor  # [H]
    eps: float


class Collectives(Protocol):
    """Called by all ranks in the same order, with tensors of the same shape and dtype."""

    device: str  # where the tensors are

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over the ranks, added to ``residual`` if there is one. Both are contiguous and used up;
        the result's memory may be theirs."""
        ...

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``all_reduce``, and the norm of its result where that is made in the same launch; None: it is not
        made. x, residual: [T, H]."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """[...] contiguous -> [size, ...], every rank's, the same bytes on all of them."""
        ...


class SingleRank:
    """Nobody else to talk to."""

    device = "cpu"

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return x if residual is None else residual.add_(x)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.all_reduce(x, residual), None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x[None]


class GlooCollectives:
    """On a CPU."""

    device = "cpu"

    def __init__(self, group: Any, size: int) -> None:
        self._group = group  # torch.distributed.ProcessGroup; the classes behind it have no types
        self._size = size

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        try:
            self._group.allreduce([x]).wait()
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        return x if residual is None else residual.add_(x)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.all_reduce(x, residual), None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty((self._size, *x.shape))
        try:
            self._group.allgather([list(parts.unbind())], [x]).wait()
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error
        return parts


def open_gloo(store: Any, rank: int, size: int) -> Collectives:
    """Meet the other ranks in ``store`` (torch.distributed.Store); returns when all have come.

    The connections are on the loopback interface: all ranks are on one host, and nobody else may listen.
    """
    if size == 1:
        return SingleRank()
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(interface="lo")]
    options._timeout = TIMEOUT
    return GlooCollectives(gloo(store, rank, size, options), size)


def file_store(path: str, size: int) -> Any:
    """A meeting place for the processes of one host: a file that only they know of."""
    return dist.FileStore(path, size)
