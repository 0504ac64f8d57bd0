"""Sums over GPUs by the fastest of three ways for their size: pushed in one step, in two, or by NCCL.

Which is the fastest hangs on the links: on how many GPUs, on NVLink or PCIe, on what lies between. So the
ranks time all three when they start, and take the first one's choice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from sgl_kernel.communication.layout import PushLayout
from sgl_kernel.communication.ops import PushSums, sum_ref
from sgl_kernel.timing import graph_micros
from sglang.srt.distributed.collectives import Collectives
from sglang.srt.distributed.cuda_ipc import CudaIpc, IpcError

logger = logging.getLogger(__name__)

ONCE_BYTES: Final = 1 << 20
TWICE_BYTES: Final = 8 << 20
DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)

_SMALLEST: Final = 4096
_SUMS_A_RUN, _REPLAYS, _RUNS = 8, 4, 3
_CHECKED_NUMELS: Final = (8, 1000, 1 << 16, 1 << 18)

Sum = Callable[[torch.Tensor, torch.Tensor], object]
Micros = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class PushLimits:
    """Up to how many bytes a sum is made in one step, and beyond that in two; NCCL makes larger ones."""

    once: int
    twice: int

    def way(self, num_bytes: int) -> str:
        if num_bytes <= self.once:
            return "once"
        return "twice" if num_bytes <= self.twice else "nccl"


class PushCollectives:
    """``Collectives`` of which small sums are pushed; NCCL does the rest."""

    device = "cuda"

    def __init__(self, nccl: Collectives, sums: PushSums, limits: PushLimits, only_fused: bool) -> None:
        """``only_fused``: NCCL also makes the sums that are added to nothing."""
        assert limits.once <= sums.layout.once_bytes and limits.twice <= sums.layout.twice_bytes
        self.limits = limits
        self._only_fused = only_fused
        self._nccl = nccl
        self._sums = sums

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        num_bytes = x.numel() * x.element_size()
        fits = x.dtype in DTYPES and (not self._only_fused if residual is None else _is_alike(x, residual))
        way = self.limits.way(num_bytes) if fits and num_bytes else "nccl"
        if way == "once":
            return self._sums.once(x, residual)
        return self._sums.twice(x, residual) if way == "twice" else self._nccl.all_reduce(x, residual)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._nccl.all_gather(x)


def _is_alike(x: torch.Tensor, residual: torch.Tensor) -> bool:
    return residual.is_contiguous() and residual.dtype == x.dtype and residual.shape == x.shape


def with_pushes(
    nccl: Collectives, store: Any, rank: int, size: int, device: torch.device, *, only_fused: bool
) -> Collectives:
    """With pushes for the sizes where they are faster; ``nccl`` itself where they can't be had, or never are.

    ``store``: torch.distributed.Store, where the ranks have met. Called by all of them.
    """
    sums = share(store, rank, PushLayout(size, ONCE_BYTES, TWICE_BYTES), device)
    if not _all(nccl, sums is not None, device):
        _say(rank, "sums over the GPUs: NCCL; the GPUs' memory can't be shared between processes (see above)")
        return nccl
    assert sums is not None
    if not _all(nccl, is_right(sums, nccl, device), device):
        _say(rank, "sums over the GPUs: NCCL; sums by our own kernels came out wrong here")
        return nccl
    times = time_all(sums, nccl, device)
    found = choose_limits(times)
    agreed = _gather(nccl, [found.once, found.twice], device)[0]  # the first rank's
    limits = PushLimits(*agreed)
    _say(
        rank, "sums over the GPUs: pushed in one step up to %d KiB, in two up to %d KiB, else NCCL",
        limits.once >> 10, max(limits.once, limits.twice) >> 10,
    )  # fmt: skip
    if not limits.once and not limits.twice:
        return nccl
    return PushCollectives(nccl, sums, limits, only_fused)


def share(store: Any, rank: int, layout: PushLayout, device: torch.device) -> PushSums | None:
    """This rank's side; None where it can't be had. Every rank writes to the store, whatever happens."""
    own, exported, addresses = 0, b"", []
    try:
        ipc = CudaIpc()
        own = ipc.allocate(layout.total_bytes)
        exported = ipc.export(own)
    except IpcError as error:
        logger.warning("rank %d can't share its GPU's memory: %s", rank, error)
    store.set(f"push/{rank}", exported)
    handles = [bytes(store.get(f"push/{peer}")) for peer in range(layout.size)]
    if not all(handles):
        return None
    try:
        addresses = [own if peer == rank else ipc.open(handle) for peer, handle in enumerate(handles)]
    except IpcError as error:
        logger.warning("rank %d can't see another GPU's memory: %s", rank, error)
        return None
    return PushSums(rank, addresses, layout, device)


def is_right(sums: PushSums, nccl: Collectives, device: torch.device) -> bool:
    """Both kinds against what the parts add up to. Sums in turn, so that places are used again."""
    right = True
    for turn in range(4):
        for numel in _CHECKED_NUMELS:
            generator = torch.Generator(device).manual_seed(100 * turn + sums.rank)
            x = torch.randn(numel, dtype=torch.float32, device=device, generator=generator).bfloat16()
            parts, residual = nccl.all_gather(x), torch.ones_like(x)
            for kind, twice in ((sums.once, False), (sums.twice, True)):
                got = kind(x.clone(), residual.clone())
                right &= torch.equal(got, sum_ref(parts, residual, twice=twice))
    return right


def time_all(
    sums: PushSums, nccl: Collectives, device: torch.device, micros: Micros | None = None
) -> dict[int, dict[str, float]]:
    """Microseconds by bytes of a message, and by way. All ranks make the same sums."""
    micros = micros or (lambda run: graph_micros(run, _REPLAYS, _RUNS))
    ways: dict[str, tuple[Sum, int]] = {
        "once": (sums.once, sums.layout.once_bytes),
        "twice": (sums.twice, sums.layout.twice_bytes),
        "nccl": (nccl.all_reduce, TWICE_BYTES),
    }
    times: dict[int, dict[str, float]] = {}
    num_bytes = _SMALLEST
    while num_bytes <= TWICE_BYTES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        fitting = {name: add for name, (add, most) in ways.items() if num_bytes <= most}
        times[num_bytes] = {
            name: micros(partial(_repeat, add, x, torch.zeros_like(x))) / _SUMS_A_RUN
            for name, add in fitting.items()
        }
        num_bytes *= 2
    return times


def _repeat(add: Sum, x: torch.Tensor, residual: torch.Tensor) -> None:
    for _ in range(_SUMS_A_RUN):
        add(x, residual)


def choose_limits(times: dict[int, dict[str, float]]) -> PushLimits:
    """Those with which sums of all sizes together lose least to the fastest way of each, in shares of its
    time: one figure that is off then moves no limit far."""
    pushed_once = [0, *(num_bytes for num_bytes, of_way in sorted(times.items()) if "once" in of_way)]
    candidates = [
        PushLimits(once, twice) for once in pushed_once for twice in (0, *times) if not twice or twice > once
    ]

    def loss(limits: PushLimits) -> float:
        taken = ((of_way[limits.way(num_bytes)], of_way) for num_bytes, of_way in times.items())
        return sum(time_us / min(of_way.values()) for time_us, of_way in taken)

    return min(candidates, key=loss)


def _all(nccl: Collectives, own: bool, device: torch.device) -> bool:
    return all(values[0] for values in _gather(nccl, [int(own)], device))


def _gather(nccl: Collectives, own: Sequence[int], device: torch.device) -> list[list[int]]:
    gathered: list[list[int]] = nccl.all_gather(torch.tensor(own, device=device)).tolist()
    return gathered


def _say(rank: int, text: str, *values: object) -> None:
    if rank == 0:
        logger.info(text, *values)
