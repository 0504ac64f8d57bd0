"""Host values to a device tensor without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
