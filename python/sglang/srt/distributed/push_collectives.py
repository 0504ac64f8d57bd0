"""Sums over GPUs by the fastest way for their size: pushed in one step, in two, by NCCL, or by FlashInfer.

Which is the fastest hangs on the links: on how many GPUs, on NVLink or PCIe, on what lies between. So the
ranks time all ways when they start, and take the first one's choice. Sums whose RMS norm is wanted have ways
and limits of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch

from sgl_kernel.communication.flashinfer import FlashInferLayout, FlashInferSums, load_kernels, why_not
from sgl_kernel.communication.layout import PushLayout
from sgl_kernel.communication.ops import PushSums
from sgl_kernel.flashinfer_package import FlashInferError
from sgl_kernel.norm.ops import rms_norm
from sglang.srt.distributed.collectives import Collectives, Norm, PeerLostError
from sglang.srt.distributed.cuda_ipc import CudaIpc, IpcError, as_tensor
from sglang.srt.distributed.limits import Limits, choose_limits
from sglang.srt.distributed.sum_trials import NormWay, is_right, norms_are_right, time_norms, time_sums
from sglang.srt.distributed.tensor_parallel import StreamShape

logger = logging.getLogger(__name__)

ONCE_BYTES: Final = 1 << 20
TWICE_BYTES: Final = 8 << 20
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)

_PDL_ROWS: Final = 32  # up to so many rows the layers' norms overlap with the kernel ahead
FLASHINFER_ONCE_BYTES: Final = 2 << 20

SUM_WAYS: Final = {"once": "pushed in one step", "twice": "pushed in two", "nccl": "NCCL"}
NORM_WAYS: Final = {
    "rows": "pushed with the norm",
    "flashinfer_once": "FlashInfer in one step",
    "flashinfer_twice": "FlashInfer in two",
    "apart": "a sum, then the norm",
}
"""With what the log calls them."""


class PushCollectives:
    """``Collectives`` of which small sums are pushed; NCCL does the rest."""

    device = "cuda"

    def __init__(
        self,
        nccl: Collectives,
        sums: PushSums,
        limits: Limits,  # of SUM_WAYS
        *,
        only_fused: bool,
        norm_limits: Limits,  # of NORM_WAYS
        flashinfer: FlashInferSums | None = None,
        stream: StreamShape | None = None,
    ) -> None:
        """``only_fused``: NCCL also makes the sums that are added to nothing. ``stream``: what FlashInfer's
        kernels were tried with, and are used for."""
        self.limits = limits
        self.norm_limits = norm_limits
        self._only_fused = only_fused
        self._nccl = nccl
        self._sums = sums
        self._flashinfer = flashinfer
        self._stream = stream

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        num_bytes = x.numel() * x.element_size()
        fits = x.dtype in DTYPES and (not self._only_fused if residual is None else _is_alike(x, residual))
        way = self.limits.way(num_bytes) if fits and num_bytes else "nccl"
        if way == "once":
            return self._sums.once(x, residual)
        return self._sums.twice(x, residual) if way == "twice" else self._nccl.all_reduce(x, residual)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        way = self._norm_way(x, residual, norm)
        if way == "rows":
            return self._sums.rows(x, residual, norm.weight, norm.eps)
        if way == "apart":
            return self.all_reduce(x, residual), None
        assert self._flashinfer is not None
        twice = way == "flashinfer_twice"
        return self._flashinfer.sum_and_norm(x, residual, norm.weight, norm.eps, twice=twice)

    def _norm_way(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> str:
        if not (_is_alike(x, residual) and _is_alike(norm.weight, x[0] if len(x) else x)):
            return "apart"
        way = self.norm_limits.way(x.numel() * x.element_size())
        if way == "rows":
            return way if x.dtype in DTYPES and self._sums.takes_rows(x) else "apart"
        if way == "apart" or self._flashinfer is None or self._stream is None:
            return "apart"
        is_tried = self._stream == StreamShape(x.shape[1], x.dtype)
        return way if is_tried and self._flashinfer.takes(x, twice=way == "flashinfer_twice") else "apart"

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._nccl.all_gather(x)


def _is_alike(x: torch.Tensor, residual: torch.Tensor) -> bool:
    return residual.is_contiguous() and residual.dtype == x.dtype and residual.shape == x.shape


def with_pushes(
    nccl: Collectives,
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    *,
    only_fused: bool,
    stream: StreamShape,
    flashinfer: bool,
) -> Collectives:
    """With faster ways for the sizes that have any; ``nccl`` itself where they can't be had, or never are.

    ``store``: torch.distributed.Store, where the ranks have met. ``flashinfer``: its kernels too. Called by
    all of them.
    """
    sums = share(store, rank, PushLayout(size, ONCE_BYTES, TWICE_BYTES), device)
    if not _all(nccl, sums is not None, device):
        _say(rank, "sums over the GPUs: NCCL; the GPUs' memory can't be shared between processes (see above)")
        return nccl
    assert sums is not None
    if not _all(nccl, is_right(sums, nccl, device), device):
        _say(rank, "sums over the GPUs: NCCL; sums by our own kernels came out wrong here")
        return nccl
    limits = _agreed(time_sums(sums, nccl, TWICE_BYTES, device), tuple(SUM_WAYS), nccl, device)
    _say(rank, "sums over the GPUs: %s", limits.text(SUM_WAYS))
    apart = Limits(tuple(NORM_WAYS), (0, 0, 0))
    plain = PushCollectives(nccl, sums, limits, only_fused=only_fused, norm_limits=apart)
    of_flashinfer = open_flashinfer(nccl, store, rank, size, device, stream) if flashinfer else None
    ways = norm_ways(plain, sums, of_flashinfer)
    ways = {name: way for name, way in ways.items() if _works(name, way, stream, rank, nccl, device)}
    norm_limits = _agreed(time_norms(ways, stream, TWICE_BYTES, device), tuple(NORM_WAYS), nccl, device)
    _say(rank, "sums whose norm is wanted: %s", norm_limits.text(NORM_WAYS))
    if limits.used == ("nccl",) and norm_limits.used == ("apart",):
        return nccl
    return PushCollectives(
        nccl, sums, limits, only_fused=only_fused, norm_limits=norm_limits, flashinfer=of_flashinfer,
        stream=stream,
    )  # fmt: skip


def norm_ways(plain: Collectives, sums: PushSums, flashinfer: FlashInferSums | None) -> dict[str, NormWay]:
    """Of NORM_WAYS those that there are."""

    def apart(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = plain.all_reduce(x, residual)
        return total, rms_norm(total, weight, eps, pdl=len(x) <= _PDL_ROWS)

    ways = {"rows": NormWay(sums.rows, sums.takes_rows, exact=True)}
    if flashinfer is not None:
        for name, twice in (("flashinfer_once", False), ("flashinfer_twice", True)):
            takes = partial(flashinfer.takes, twice=twice)
            ways[name] = NormWay(partial(flashinfer.sum_and_norm, twice=twice), takes)
    return ways | {"apart": NormWay(apart, lambda x: True)}


def _works(
    name: str, way: NormWay, stream: StreamShape, rank: int, nccl: Collectives, device: torch.device
) -> bool:
    """Whether it does on all ranks. What is apart is made of what has been tried."""
    if name == "apart":
        return True
    try:
        right = norms_are_right(way, stream, rank, nccl, device)
    except PeerLostError:
        raise
    except Exception as error:  # an edge: another project's kernels, which may refuse, on all ranks alike
        logger.warning("rank %d: %s: %s", rank, NORM_WAYS[name], " ".join(str(error).split())[:300])
        right = False
    if _all(nccl, right, device):
        return True
    _say(rank, "sums whose norm is wanted: %s came out wrong here, and is not used", NORM_WAYS[name])
    return False


def share(store: Any, rank: int, layout: PushLayout, device: torch.device) -> PushSums | None:
    """This rank's side; None where it can't be had. Every rank writes to the store, whatever happens."""
    addresses = share_block(store, "push", rank, layout.size, layout.total_bytes)
    return None if addresses is None else PushSums(rank, addresses, layout, device)


def open_flashinfer(
    nccl: Collectives, store: Any, rank: int, size: int, device: torch.device, stream: StreamShape
) -> FlashInferSums | None:
    """FlashInfer's side of this rank; None, and a line in the log, where any rank can't have it."""
    if why := why_not(size, stream.width, stream.dtype):
        _say(rank, "FlashInfer makes no sums over the GPUs: %s", why)
        return None
    kernels = None
    try:
        kernels = load_kernels()
    except FlashInferError as error:
        logger.warning("FlashInfer makes no sums over the GPUs: rank %d: %s", rank, error)
    if not _all(nccl, kernels is not None, device):
        return None
    layout = FlashInferLayout(size, FLASHINFER_ONCE_BYTES, TWICE_BYTES)

    def prepare(address: int) -> None:
        layout.prepare(as_tensor(address, layout.total_bytes, device))
        torch.cuda.synchronize(device)

    addresses = share_block(store, "flashinfer", rank, size, layout.total_bytes, prepare)
    if not _all(nccl, addresses is not None, device):
        _say(rank, "FlashInfer makes no sums over the GPUs: their memory can't be shared (see above)")
        return None
    assert addresses is not None
    return FlashInferSums(kernels, rank, addresses, layout, device)


def share_block(
    store: Any,
    name: str,
    rank: int,
    size: int,
    num_bytes: int,
    prepare: Callable[[int], None] = lambda address: None,
) -> list[int] | None:
    """Addresses of a block of every rank's, as this one sees them; None where it can't be had. The own one is
    zeroed and ``prepare``-d before others see it."""
    own, exported, addresses = 0, b"", []
    try:
        ipc = CudaIpc()
        own = ipc.allocate(num_bytes)
        prepare(own)
        exported = ipc.export(own)
    except IpcError as error:
        logger.warning("rank %d can't share its GPU's memory: %s", rank, error)
    store.set(f"{name}/{rank}", exported)
    handles = [bytes(store.get(f"{name}/{peer}")) for peer in range(size)]
    if not all(handles):
        return None
    try:
        addresses = [own if peer == rank else ipc.open(handle) for peer, handle in enumerate(handles)]
    except IpcError as error:
        logger.warning("rank %d can't see another GPU's memory: %s", rank, error)
        return None
    return addresses


def _agreed(
    times: dict[int, dict[str, float]], ways: Sequence[str], nccl: Collectives, device: torch.device
) -> Limits:
    """The first rank's."""
    found = choose_limits(times, ways)
    return Limits(found.ways, tuple(_gather(nccl, found.up_to, device)[0]))


def _all(nccl: Collectives, own: bool, device: torch.device) -> bool:
    return all(values[0] for values in _gather(nccl, [int(own)], device))


def _gather(nccl: Collectives, own: Sequence[int], device: torch.device) -> list[list[int]]:
    gathered: list[list[int]] = nccl.all_gather(torch.tensor(own, device=device)).tolist()
    return gathered


def _say(rank: int, text: str, *values: object) -> None:
    if rank == 0:
        logger.info(text, *values)
