"""Collectives of GPUs by NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from sgl_kernel.launch import compiling_ahead
from sglang.srt.distributed.collectives import TIMEOUT, Norm, PeerLostError


class NcclCollectives:
    """On the current stream, so that a CUDA graph captures them like any kernel.

    While kernels are only compiled nothing is sent: ranks do that one after the other.
    """

    device = "cuda"

    def __init__(self, store: Any, rank: int, size: int, device: torch.device) -> None:
        """Returns when all ranks have come (``store``: torch.distributed.Store) and are connected.

        Connections are made by the first collective of a kind and of a size, and a capture is no place
        for that.
        """
        from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions

        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = TIMEOUT
        self._size = size
        self._sums: Any = AllreduceOptions()
        self._gathers: Any = AllgatherOptions()
        self._sums.asyncOp = self._gathers.asyncOp = False
        try:
            self._group = nccl(store, rank, size, options)
            self._group.eager_connect_single_device(device)
            for length in (1, 1 << 16, 1 << 23):
                x = torch.zeros(length, dtype=torch.float32, device=device)
                self.all_gather(self.all_reduce(x)[: length // size + 1])
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise PeerLostError(f"NCCL can't connect the GPUs: {error}") from error

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if not compiling_ahead():
            self._send(lambda: self._group.allreduce([x], self._sums))
        return x if residual is None else residual.add_(x)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.all_reduce(x, residual), None

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.new_empty((self._size, *x.shape))
        if not compiling_ahead():
            self._send(lambda: self._group._allgather_base(parts.view(-1), x.view(-1), self._gathers))
        return parts

    @staticmethod
    def _send(collective: Callable[[], Any]) -> None:
        """The stream waits for it, not the host.

        Raises:
            PeerLostError: NCCL has found, by now, that another rank is gone. While a kernel waits for one, it
                finds nothing; who watches the processes does.
        """
        try:
            work = collective()
            if work is not None:
                work.wait()
        except dist.DistError as error:
            raise PeerLostError(f"NCCL: {error}") from error
