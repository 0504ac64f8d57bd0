"""Sums over the ranks of one host, by ``kernels.py``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.communication.layout import MAX_RANKS, MAX_ROWS, PROGRAM_BYTES, ROW_BYTES, PushLayout
from sgl_kernel.launch import Launch, next_power_of_2
from sgl_kernel.norm.ops import row_warps

_ALIGNED_ELEMENTS = 16  # of a part: whole vectors of 16 bytes, in any dtype


class PushSums:
    """One rank's side. All ranks must make the same sums in the same order, on one stream each."""

    def __init__(self, rank: int, addresses: Sequence[int], layout: PushLayout, device: torch.device) -> None:
        """addresses: of every rank's zeroed block of ``layout.total_bytes``, as this rank's GPU sees them."""
        assert len(addresses) == layout.size <= MAX_RANKS and 0 <= rank < layout.size
        assert all(address % PROGRAM_BYTES == 0 for address in addresses)
        self.rank = rank
        self.layout = layout
        self.peers = torch.tensor(addresses, dtype=torch.int64, device=device)  # [size]
        # [3, programs] sums that each has made: in one step, in two, by rows
        self.counters = torch.zeros(3, layout.programs, dtype=torch.int32, device=device)

    def once(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """x: contiguous, ``layout.once_bytes`` at most, used up -> the sum over the ranks, added to the
        residual if there is one; memory of x, or of the residual. Rounded once."""
        out = x if residual is None else residual
        self.once_launch(x, residual, out).run()
        return out

    def twice(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """As ``once``, ``layout.twice_bytes`` at most; less is sent, and waited for twice. The sum is
        rounded, and again when it has been added to the residual."""
        out = x if residual is None else residual
        self.twice_launch(x, residual, out).run()
        return out

    @staticmethod
    def takes_rows(x: torch.Tensor) -> bool:
        """Whether ``rows`` can do it. x: [T, H]."""
        return 0 < x.shape[0] <= MAX_ROWS and x.shape[1] * x.element_size() <= ROW_BYTES

    def rows(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As ``once``, and the RMS norm of it in the same launch. x, residual: [T, H]; weight: [H].

        The sum is that of ``once`` and the norm that of ``rms_norm``, to the bit.
        """
        normed = torch.empty_like(x)
        self.rows_launch(x, residual, normed, weight, eps).run()
        return residual, normed

    def rows_launch(
        self, x: torch.Tensor, residual: torch.Tensor, normed: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> Launch:
        from sgl_kernel.communication.kernels import push_rows_kernel

        layout, (num_rows, columns) = self.layout, x.shape
        assert self.takes_rows(x) and x.is_contiguous(), f"{num_rows} rows of {columns}, {x.dtype}"
        assert residual.shape == x.shape and residual.is_contiguous() and residual.dtype == x.dtype
        assert weight.shape == (columns,) and weight.is_contiguous()
        block = next_power_of_2(columns)
        constants = {
            "FLAGS": layout.flags(3), "FLAG_ROW": layout.programs, "DATA": layout.row_data,
            "ROOM": MAX_ROWS * ROW_BYTES, "PLACE": ROW_BYTES, "COLUMNS": columns,
        }  # fmt: skip
        args = (x, residual, normed, weight, self.peers, self.counters[2], eps)
        return self._launch(
            push_rows_kernel, num_rows, args, constants, block, pdl=True, num_warps=row_warps(block)
        )

    def once_launch(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> Launch:
        from sgl_kernel.communication.kernels import push_once_kernel

        layout, block = self.layout, self._block(x, residual, out, self.layout.once_bytes)
        programs = -(-x.numel() // block)
        constants = {
            "FLAGS": layout.flags(0), "FLAG_ROW": layout.programs, "DATA": layout.once_data,
            "ROOM": layout.once_programs * PROGRAM_BYTES,
        }  # fmt: skip
        args = (x, residual, out, self.peers, self.counters[0], x.numel())
        return self._launch(push_once_kernel, programs, args, constants, block, pdl=True)

    def twice_launch(self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> Launch:
        from sgl_kernel.communication.kernels import push_twice_kernel

        layout, block = self.layout, self._block(x, residual, out, self.layout.twice_bytes)
        part = part_of(x.numel(), layout.size)
        constants = {
            "PART_FLAGS": layout.flags(1), "SUM_FLAGS": layout.flags(2), "FLAG_ROW": layout.programs,
            "PARTS": layout.twice_parts, "SUMS": layout.twice_sums,
            "ROOM": layout.twice_programs * PROGRAM_BYTES,
        }  # fmt: skip
        args = (x, residual, out, self.peers, self.counters[1], x.numel(), part)
        return self._launch(push_twice_kernel, -(-part // block), args, constants, block, pdl=False)

    def _block(
        self, x: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor, most_bytes: int
    ) -> int:
        """Elements of a program."""
        assert x.is_contiguous() and out.is_contiguous(), "a message is one piece"
        assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
        assert residual is None or residual.dtype == x.dtype
        assert 0 < x.numel() * x.element_size() <= most_bytes, f"{x.numel()} elements of {x.dtype}"
        return PROGRAM_BYTES // x.element_size()

    def _launch(
        self,
        kernel: object,
        programs: int,
        args: tuple[object, ...],
        constants: dict[str, int],
        block: int,
        *,
        pdl: bool,
        num_warps: int = 4,
    ) -> Launch:
        pdl = pdl and device_info(self.peers.device).has_pdl
        shape = {"RANK": self.rank, "SIZE": self.layout.size, "BLOCK": block, "PDL": pdl}
        return Launch(kernel, (programs,), args, constants | shape, num_warps=num_warps, pdl=pdl)


def part_of(numel: int, size: int) -> int:
    """Elements that each rank adds up in a sum of two steps; the last ranks may have fewer, or none."""
    return -(-numel // (size * _ALIGNED_ELEMENTS)) * _ALIGNED_ELEMENTS


def sum_ref(parts: torch.Tensor, residual: torch.Tensor | None = None, *, twice: bool) -> torch.Tensor:
    """What every rank gets, to the bit: parts [size, ...] of all ranks, in their order."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total += part.float()
    if residual is None:
        return total.to(parts.dtype)
    if twice:
        total = total.to(parts.dtype).float()
    return (total + residual.float()).to(parts.dtype)
