"""Host values to device tensors without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Sequence[Sequence[float]],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A tensor of ``values`` on ``device``; from pinned memory where that lets the copy overlap."""
    if device.type == "cpu":
        return torch.tensor(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def upload_into(out: torch.Tensor, values: Sequence[int] | Sequence[float]) -> None:
    """``values`` to a tensor that is on the device already, as ``upload`` does it."""
    # A pinned tensor stays allocated until the copy has run: torch's pinned allocator sees to that.
    pinned = torch.tensor(values, dtype=out.dtype, pin_memory=out.device.type == "cuda")
    out.copy_(pinned, non_blocking=True)


def upload_array(values: npt.NDArray[np.int32], device: torch.device) -> torch.Tensor:
    """A tensor of ``values`` (which may be read-only), as ``upload`` makes it."""
    pinned = torch.empty(values.shape, dtype=torch.int32, pin_memory=device.type == "cuda")
    pinned.numpy()[...] = values
    return pinned.to(device, non_blocking=True)


def upload_all(parts: Sequence[Ints], device: torch.device) -> list[torch.Tensor]:
    """One copy for all: a tensor [len] int64 of each part; they share their memory.

    Each begins at a multiple of 16 bytes, or kernels that take it would be compiled for both cases.
    """
    begins = list(accumulate((len(part) + len(part) % 2 for part in parts), initial=0))
    pinned = torch.empty(begins[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    host = pinned.numpy()
    for begin, part in zip(begins, parts, strict=False):
        host[begin : begin + len(part)] = part
    sent = pinned.to(device, non_blocking=True)
    return [sent[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=False)]


def ints(values: Iterable[int], count: int = -1) -> Ints:
    """An array of Python integers; ``count`` of them, if that is known."""
    return np.fromiter(values, np.int64, count)


def ranges(starts: Ints, lens: Ints) -> Ints:
    """start, start + 1, … start + len - 1 of each pair, one after the other."""
    ends = lens.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lens), lens) + np.arange(total)
