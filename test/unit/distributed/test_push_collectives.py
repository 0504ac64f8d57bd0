"""Which way a sum goes, and what the ranks agree on when they start. No GPU is needed to decide.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.communication.layout import PushLayout
from sgl_kernel.communication.ops import sum_ref
from sglang.srt.distributed import push_collectives as module
from sglang.srt.distributed.collectives import Collectives, SingleRank, open_gloo
from sglang.srt.distributed.cuda_ipc import IpcError
from sglang.srt.distributed.push_collectives import PushCollectives, PushLimits, choose_limits, with_pushes

CPU = torch.device("cpu")


@dataclass
class Sums:
    """Of pushes: what was asked for; the sums themselves by Gloo."""

    rank: int
    nccl: Collectives
    layout: PushLayout
    wrong: bool = False
    asked: list[tuple[str, int]] = field(default_factory=list)

    def once(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self._sum("once", x, residual)

    def twice(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return self._sum("twice", x, residual)

    def _sum(self, name: str, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        self.asked.append((name, x.numel() * x.element_size()))
        total = sum_ref(self.nccl.all_gather(x), residual, twice=name == "twice")
        return total + 1 if self.wrong else total


def collectives(limits: PushLimits, only_fused: bool = False) -> tuple[PushCollectives, Sums]:
    sums = Sums(0, SingleRank(), PushLayout(2, 1 << 20, 8 << 20))
    return PushCollectives(SingleRank(), sums, limits, only_fused), sums  # type: ignore[arg-type]


def test_a_sum_goes_the_way_of_its_size() -> None:
    group, sums = collectives(PushLimits(256, 1024))
    for numel in (64, 65, 256, 257):
        x, residual = torch.ones(numel), torch.ones(numel)
        assert torch.equal(group.all_reduce(x, residual), torch.full((numel,), 2.0))
    assert sums.asked == [("once", 256), ("twice", 260), ("twice", 1024)]


def test_what_pushes_can_not_do_is_left_to_nccl() -> None:
    group, sums = collectives(PushLimits(4096, 4096))
    group.all_reduce(torch.ones(4, dtype=torch.float64))
    group.all_reduce(torch.ones(4, dtype=torch.int64))
    group.all_reduce(torch.ones(0))
    group.all_reduce(torch.ones(2, 2), torch.ones(2, 4)[:, ::2])
    group.all_reduce(torch.ones(4).bfloat16(), torch.ones(4))
    assert sums.asked == []


def test_only_sums_that_are_added_to_the_stream() -> None:
    group, sums = collectives(PushLimits(4096, 4096), only_fused=True)
    group.all_reduce(torch.ones(4))
    assert sums.asked == []
    group.all_reduce(torch.ones(4), torch.ones(4))
    assert sums.asked == [("once", 16)]


TIMES = st.lists(st.tuples(*[st.floats(1, 100)] * 3), min_size=1, max_size=8)


def table_of(times: list[tuple[float, float, float]], num_once: int) -> dict[int, dict[str, float]]:
    """By ``once`` (the first sizes only), ``twice`` and NCCL, of sizes that double."""
    return {
        4096 << i: {"twice": twice, "nccl": nccl} | ({"once": once} if i < num_once else {})
        for i, (once, twice, nccl) in enumerate(times)
    }


@settings(max_examples=30, deadline=None)
@given(TIMES, st.integers(0, 8))
def test_limits_are_never_worse_than_one_way_for_all(
    times: list[tuple[float, float, float]], num_once: int
) -> None:
    table = table_of(times, num_once)
    limits = choose_limits(table)

    def loss(one: PushLimits) -> float:
        return sum(of_way[one.way(size)] / min(of_way.values()) for size, of_way in table.items())

    assert loss(limits) <= min(loss(PushLimits(0, 0)), loss(PushLimits(0, max(table)))) + 1e-9
    assert limits.twice == 0 or limits.twice > limits.once


@settings(max_examples=40, deadline=None)
@given(
    crossings=st.tuples(st.integers(0, 8), st.integers(0, 4)),
    off=st.none() | st.integers(0, 11),
    slower=st.floats(1.05, 3.0),
)
def test_limits_are_where_the_ways_cross(crossings: tuple[int, int], off: int | None, slower: float) -> None:
    """Also if one figure in the middle of others is off."""
    once, twice = crossings[0], crossings[0] + crossings[1]
    times = [
        (1.0, slower, slower) if i < once else (slower, 1.0, slower) if i < twice else (slower, slower, 1.0)
        for i in range(12)
    ]
    if off is not None and all(abs(off - edge) > 2 for edge in (once, twice)):
        times[off] = (1.0, 1.0 + 1.5 * (slower - 1), 1.0) if off >= once else (slower, 1.0, 1.0)
    limits = choose_limits(table_of(times, 9))
    assert limits.once == (4096 << once - 1 if once else 0)
    assert limits.twice == (4096 << twice - 1 if twice > once else 0)


class _Times:
    """Of a rank; what is timed must be the same sums in the same order, or Gloo would mix them up."""

    def __init__(self, once: float, twice: float) -> None:
        self._of = {"once": once, "twice": twice, "all_reduce": 10.0}

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        return self._of[run.args[0].__name__]  # type: ignore[attr-defined]


def start_all(monkeypatch: pytest.MonkeyPatch, by_rank: list[dict[str, Any]]) -> list[Collectives]:
    """Every rank's collectives, each in a thread. By rank: times, whether sums are wrong or missing."""
    store, size, local = dist.HashStore(), len(by_rank), threading.local()

    def share(store: Any, rank: int, layout: PushLayout, device: torch.device) -> Sums | None:
        how = by_rank[rank]
        return None if how.get("missing") else Sums(rank, local.nccl, layout, how.get("wrong", False))

    def time_all(sums: Any, nccl: Any, device: torch.device) -> Any:
        return timed(sums, nccl, device, _Times(*by_rank[sums.rank].get("times", (1.0, 5.0))))

    def start(rank: int) -> Collectives:
        local.nccl = open_gloo(store, rank, size)
        return with_pushes(local.nccl, store, rank, size, CPU, only_fused=False)

    timed = module.time_all
    monkeypatch.setattr(module, "share", share)
    monkeypatch.setattr(module, "time_all", time_all)
    monkeypatch.setattr(module, "TWICE_BYTES", 1 << 15)
    monkeypatch.setattr(module, "ONCE_BYTES", 1 << 14)
    monkeypatch.setattr(module, "_CHECKED_NUMELS", (8, 1000))
    monkeypatch.setattr(module, "_SUMS_A_RUN", 1)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(start, range(size)))


def test_ranks_take_the_first_ones_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{"times": (1.0, 5.0)}, {"times": (20.0, 20.0)}])
    assert all(isinstance(group, PushCollectives) for group in groups)
    assert [group.limits for group in groups] == [PushLimits(1 << 14, 1 << 15)] * 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", ["missing", "wrong"])
def test_one_rank_that_can_not_push_is_enough(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{}, {how: True}, {}])
    assert not any(isinstance(group, PushCollectives) for group in groups)


def test_pushes_that_are_never_faster_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{"times": (11.0, 12.0)}, {}])
    assert not any(isinstance(group, PushCollectives) for group in groups)


def test_memory_that_can_not_be_shared_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def allocate(self, num_bytes: int) -> int:
            return 4096

        def export(self, address: int) -> bytes:
            raise IpcError("cudaIpcGetMemHandle: not supported")

    monkeypatch.setattr(module, "CudaIpc", Broken)
    store, layout = dist.HashStore(), PushLayout(2, 4096, 4096)
    with ThreadPoolExecutor(2) as threads:
        shared = list(threads.map(lambda rank: module.share(store, rank, layout, CPU), range(2)))
    assert shared == [None, None]
