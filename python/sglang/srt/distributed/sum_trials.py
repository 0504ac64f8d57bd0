"""Tries the ways of a sum over GPUs: which are right, and how long each takes. All ranks call the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from sgl_kernel.communication.ops import PushSums, sum_ref
from sgl_kernel.norm.ops import rms_norm_ref
from sgl_kernel.timing import graph_micros
from sglang.srt.distributed.collectives import Collectives
from sglang.srt.distributed.tensor_parallel import StreamShape

_SMALLEST: Final = 4096
_SUMS_A_RUN, _REPLAYS, _RUNS = 8, 4, 3
_CHECKED_NUMELS: Final = (8, 1000, 1 << 16, 1 << 18)
_CHECKED_ROWS: Final = (1, 3, 40)
EPS: Final = 1e-5

Sum = Callable[[torch.Tensor, torch.Tensor], object]
NormedSum = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
"""x [T, H], residual [T, H], weight [H], eps -> sum and norm, [T, H]."""
Micros = Callable[[Callable[[], object]], float]


@dataclass(frozen=True, slots=True)
class NormWay:
    add: NormedSum
    takes: Callable[[torch.Tensor], bool]
    exact: bool = False  # the sum is rounded once, so it can be compared to the bit


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


def norms_are_right(
    way: NormWay, shape: StreamShape, rank: int, nccl: Collectives, device: torch.device
) -> bool:
    """Sum and norm against those of the parts; and all ranks have the same bytes."""
    right = True
    for turn in range(4):
        for rows in _CHECKED_ROWS:
            of_all = torch.Generator(device).manual_seed(turn)
            own = torch.Generator(device).manual_seed(100 * turn + rank + 1)
            x = torch.randn(rows, shape.width, device=device, generator=own).to(shape.dtype)
            residual = torch.randn(rows, shape.width, device=device, generator=of_all).to(shape.dtype)
            weight = torch.randn(shape.width, device=device, generator=of_all).to(shape.dtype)
            if way.takes(x):
                parts = nccl.all_gather(x)
                got = way.add(x, residual.clone(), weight, EPS)
                right &= is_normed_sum(got, parts, residual, weight, exact=way.exact)
                right &= all(bool((every == every[0]).all()) for every in map(nccl.all_gather, got))
    return right


def is_normed_sum(
    got: tuple[torch.Tensor, torch.Tensor],
    parts: torch.Tensor,  # [size, T, H]
    residual: torch.Tensor,  # [T, H]
    weight: torch.Tensor,  # [H]
    *,
    exact: bool,
) -> bool:
    """Whether ``got`` is the sum of all, and its norm; one that is rounded more often is close to it."""
    total, normed = got
    wanted = sum_ref(parts, residual, twice=not exact)
    ulps = 2 * torch.finfo(total.dtype).eps
    right = torch.equal(total, wanted) if exact else torch.allclose(total, wanted, rtol=ulps, atol=ulps)
    of_total = rms_norm_ref(total, weight, EPS, torch.empty_like(total))
    return right and torch.allclose(normed, of_total, rtol=ulps, atol=ulps)


def time_sums(
    sums: PushSums, nccl: Collectives, most_bytes: int, device: torch.device, micros: Micros | None = None
) -> dict[int, dict[str, float]]:
    """Microseconds by bytes of a message, and by way."""
    micros = micros or _micros
    ways: dict[str, tuple[Sum, int]] = {
        "once": (sums.once, sums.layout.once_bytes),
        "twice": (sums.twice, sums.layout.twice_bytes),
        "nccl": (nccl.all_reduce, most_bytes),
    }
    times: dict[int, dict[str, float]] = {}
    num_bytes = _SMALLEST
    while num_bytes <= most_bytes:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
        fitting = {name: add for name, (add, most) in ways.items() if num_bytes <= most}
        times[num_bytes] = {
            name: micros(partial(_repeat, add, x, torch.zeros_like(x))) / _SUMS_A_RUN
            for name, add in fitting.items()
        }
        num_bytes *= 2
    return times


def time_norms(
    ways: Mapping[str, NormWay],
    shape: StreamShape,
    most_bytes: int,
    device: torch.device,
    micros: Micros | None = None,
) -> dict[int, dict[str, float]]:
    """As ``time_sums``, of sums that are normed."""
    micros = micros or _micros
    times: dict[int, dict[str, float]] = {}
    rows, row_bytes = 1, shape.width * shape.dtype.itemsize
    weight = torch.ones(shape.width, dtype=shape.dtype, device=device)
    while rows * row_bytes <= most_bytes:
        x = torch.zeros(rows, shape.width, dtype=shape.dtype, device=device)
        times[rows * row_bytes] = {
            name: micros(partial(_repeat, partial(_add_to, way, weight), x, torch.zeros_like(x)))
            / _SUMS_A_RUN
            for name, way in ways.items()
            if way.takes(x)
        }
        rows *= 2
    return times


def _micros(run: Callable[[], object]) -> float:
    return graph_micros(run, _REPLAYS, _RUNS)


def _add_to(way: NormWay, weight: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> None:
    way.add(x, residual, weight, EPS)


def _repeat(add: Sum, x: torch.Tensor, residual: torch.Tensor) -> None:
    for _ in range(_SUMS_A_RUN):
        add(x, residual)
