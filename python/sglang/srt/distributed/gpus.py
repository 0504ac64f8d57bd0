"""Ranks on the GPUs of one host, rank r on GPU r."""

from __future__ import annotations

from typing import Any

import torch

from sgl_kernel.communication.layout import MAX_RANKS
from sglang.srt.distributed.collectives import Collectives
from sglang.srt.distributed.nccl import NcclCollectives
from sglang.srt.distributed.push_collectives import with_pushes
from sglang.srt.distributed.shares import ShardingError
from sglang.srt.distributed.tensor_parallel import StreamShape


def open_gpus(
    store: Any,
    rank: int,
    size: int,
    *,
    pushes: bool,
    only_fused: bool,
    stream: StreamShape,
    flashinfer: bool = False,
) -> Collectives:
    """Meet the other ranks in ``store`` (torch.distributed.Store); returns when all have come.

    From then on this thread is on the rank's GPU; another one must ask for it (``torch.cuda.set_device``),
    or it would take memory of the first.

    ``pushes``: small sums by our own kernels where they are faster; ``only_fused``: and those alone that are
    added to the residual stream. ``stream``: the shape of that. ``flashinfer``: its kernel too, where it is
    the fastest for sums whose norm is wanted.

    Raises:
        ShardingError: there are fewer GPUs than ranks.
        PeerLostError: another rank is gone.
    """
    count = torch.cuda.device_count()
    if count < size:
        raise ShardingError(f"--tp-size {size}: there are {count} GPUs here that this process may use")
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    nccl = NcclCollectives(store, rank, size, device)
    if not pushes or size > MAX_RANKS:
        return nccl
    return with_pushes(
        nccl, store, rank, size, device, only_fused=only_fused, stream=stream, flashinfer=flashinfer
    )
