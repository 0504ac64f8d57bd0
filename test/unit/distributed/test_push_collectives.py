"""Which way a sum goes, and what the ranks agree on when they start. No GPU is needed to decide.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sgl_kernel.communication.layout import PushLayout
from sgl_kernel.communication.ops import PushSums, sum_ref
from sgl_kernel.norm.ops import rms_norm_ref
from sglang.srt.distributed import push_collectives as module
from sglang.srt.distributed import sum_trials
from sglang.srt.distributed.collectives import Collectives, SingleRank, open_gloo
from sglang.srt.distributed.cuda_ipc import IpcError
from sglang.srt.distributed.limits import Limits
from sglang.srt.distributed.push_collectives import NORM_WAYS, SUM_WAYS, PushCollectives, with_pushes
from sglang.srt.distributed.tensor_parallel import StreamShape
from sglang.srt.layers.norm import RMSNorm

CPU, BF16 = torch.device("cpu"), torch.bfloat16
STREAM = StreamShape(64, BF16)


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

    def rows(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = self._sum("rows", x, residual)
        return total, rms_norm_ref(total, weight, eps, torch.empty_like(total))

    takes_rows = staticmethod(PushSums.takes_rows)

    def _sum(self, name: str, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        self.asked.append((name, x.numel() * x.element_size()))
        total = sum_ref(self.nccl.all_gather(x), residual, twice=name == "twice")
        return total + 1 if self.wrong else total


@dataclass
class FlashInfer:
    """As ``FlashInferSums``."""

    rank: int
    nccl: Collectives
    wrong: str = ""  # sum, norm, or what differs between the ranks
    asked: list[bool] = field(default_factory=list)

    def takes(self, x: torch.Tensor, *, twice: bool) -> bool:
        return x.dtype == BF16 and (not twice or len(x) > 2)

    def sum_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, twice: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(twice)
        if self.wrong == "refuses":
            raise ValueError("unsupported ranks number!")
        total = sum_ref(self.nccl.all_gather(x), residual, twice=True)
        normed = rms_norm_ref(total, weight, eps, torch.empty_like(total))
        total += self.wrong == "sum"
        normed += self.wrong == "norm"
        if self.wrong == "one number of a rank" and self.rank == 1:
            normed[0, 0] *= 1 + torch.finfo(BF16).eps
        return total, normed


def limits_of(once: int, twice: int) -> Limits:
    return Limits(tuple(SUM_WAYS), (once, twice))


def collectives(
    limits: Limits, only_fused: bool = False, norm_limits: tuple[int, int, int] = (0, 0, 0)
) -> tuple[PushCollectives, Sums]:
    sums = Sums(0, SingleRank(), PushLayout(2, 1 << 20, 8 << 20))
    group = PushCollectives(
        SingleRank(), sums, limits, only_fused=only_fused,  # type: ignore[arg-type]
        norm_limits=Limits(tuple(NORM_WAYS), norm_limits),
        flashinfer=FlashInfer(0, SingleRank()), stream=STREAM,  # type: ignore[arg-type]
    )  # fmt: skip
    return group, sums


def test_a_sum_goes_the_way_of_its_size() -> None:
    group, sums = collectives(limits_of(256, 1024))
    for numel in (64, 65, 256, 257):
        x, residual = torch.ones(numel), torch.ones(numel)
        assert torch.equal(group.all_reduce(x, residual), torch.full((numel,), 2.0))
    assert sums.asked == [("once", 256), ("twice", 260), ("twice", 1024)]


def test_what_pushes_can_not_do_is_left_to_nccl() -> None:
    group, sums = collectives(limits_of(4096, 4096))
    group.all_reduce(torch.ones(4, dtype=torch.float64))
    group.all_reduce(torch.ones(4, dtype=torch.int64))
    group.all_reduce(torch.ones(0))
    group.all_reduce(torch.ones(2, 2), torch.ones(2, 4)[:, ::2])
    group.all_reduce(torch.ones(4).bfloat16(), torch.ones(4))
    assert sums.asked == []


def test_only_sums_that_are_added_to_the_stream() -> None:
    group, sums = collectives(limits_of(4096, 4096), only_fused=True)
    group.all_reduce(torch.ones(4))
    assert sums.asked == []
    group.all_reduce(torch.ones(4), torch.ones(4))
    assert sums.asked == [("once", 16)]


def normed(group: PushCollectives, rows: int, width: int = 64, dtype: torch.dtype = BF16) -> bool:
    """Whether the norm came with the sum; what there is must be right."""
    x, residual = torch.full((rows, width), 2.0, dtype=dtype), torch.ones(rows, width, dtype=dtype)
    norm = RMSNorm(torch.full((width,), 0.5, dtype=dtype), 1e-5)
    total, made = group.sum_and_norm(x, residual, norm)
    assert torch.equal(total, torch.full_like(x, 3.0))
    assert made is None or torch.equal(made, norm(total))
    return made is not None


def test_a_sum_that_is_normed_goes_the_way_of_its_size() -> None:
    group, sums = collectives(limits_of(1 << 20, 1 << 20), norm_limits=(256, 512, 1024))
    asked = group._flashinfer.asked  # type: ignore[union-attr]
    assert [normed(group, rows) for rows in (1, 2, 4, 8, 16)] == [True] * 4 + [False]
    assert sums.asked == [("rows", 128), ("rows", 256), ("once", 2048)]
    assert asked == [False, True]


@pytest.mark.parametrize("way", [0, 1, 2])
def test_what_a_way_does_not_take_is_normed_apart(way: int) -> None:
    most = tuple(0 if i < way else 1 << 20 for i in range(3))
    group, _ = collectives(limits_of(0, 0), norm_limits=most)  # type: ignore[arg-type]
    assert normed(group, 8)
    others = [(8, 64, torch.float64), (0, 64, BF16)]
    others += [(257, 64, BF16)] if way == 0 else [(8, 128, BF16), (8, 64, torch.float16)]
    others += [(2, 64, BF16)] if way == 2 else []
    assert not any(normed(group, *case) for case in others)


def test_a_norm_of_another_type_is_made_apart() -> None:
    group, _ = collectives(limits_of(0, 0), norm_limits=(1 << 20, 1 << 20, 1 << 20))
    x = torch.ones(2, 64, dtype=BF16)
    assert group.sum_and_norm(x, x.clone(), RMSNorm(torch.ones(64), 1e-5))[1] is None


class _Times:
    """Of a rank; what is timed must be the same sums in the same order, or Gloo would mix them up."""

    def __init__(self, of_way: dict[str, float]) -> None:
        self._of = {"once": 1.0, "twice": 5.0, "all_reduce": 10.0, "rows": 2.0, "apart": 6.0}
        self._of |= {"flashinfer_once": 20.0, "flashinfer_twice": 20.0} | of_way

    def __call__(self, run: Callable[[], object]) -> float:
        run()
        add: Any = run.args[0]  # type: ignore[attr-defined]
        if isinstance(add, partial):  # a sum that is normed
            add = add.args[0].add
            if isinstance(add, partial):
                return self._of[f"flashinfer_{'twice' if add.keywords['twice'] else 'once'}"]
        return self._of[add.__name__]


def start_all(
    monkeypatch: pytest.MonkeyPatch, by_rank: list[dict[str, Any]], flashinfer: bool = False
) -> list[Collectives]:
    """Every rank's collectives, each in a thread. By rank: times, whether sums are wrong or missing, and
    FlashInfer's."""
    store, size, local = dist.HashStore(), len(by_rank), threading.local()

    def share(store: Any, rank: int, layout: PushLayout, device: torch.device) -> Sums | None:
        how = by_rank[rank]
        return None if how.get("missing") else Sums(rank, local.nccl, layout, how.get("wrong", False))

    def open_flashinfer(nccl: Collectives, store: Any, rank: int, *args: Any) -> FlashInfer | None:
        return FlashInfer(rank, nccl, by_rank[rank].get("flashinfer", ""))

    def micros(rank: int) -> _Times:
        return _Times(by_rank[rank].get("times", {}))

    def time_sums(sums: Any, nccl: Any, most_bytes: int, device: torch.device) -> Any:
        return sum_trials.time_sums(sums, nccl, most_bytes, device, micros(sums.rank))

    def time_norms(ways: Any, shape: Any, most_bytes: int, device: torch.device) -> Any:
        return sum_trials.time_norms(ways, shape, most_bytes, device, micros(local.rank))

    def start(rank: int) -> Collectives:
        local.nccl, local.rank = open_gloo(store, rank, size), rank
        how: dict[str, Any] = {"only_fused": False, "stream": STREAM, "flashinfer": flashinfer}
        return with_pushes(local.nccl, store, rank, size, CPU, **how)

    for name in ("share", "open_flashinfer", "time_sums", "time_norms"):
        monkeypatch.setattr(module, name, locals()[name])
    monkeypatch.setattr(module, "TWICE_BYTES", 1 << 15)
    monkeypatch.setattr(module, "ONCE_BYTES", 1 << 14)
    monkeypatch.setattr(sum_trials, "_CHECKED_NUMELS", (8, 1000))
    monkeypatch.setattr(sum_trials, "_SUMS_A_RUN", 1)
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(start, range(size)))


SLOW = {"once": 20.0, "twice": 20.0}
FAST = {"flashinfer_once": 1.0, "flashinfer_twice": 9.0}


def norm_limits(groups: list[Collectives]) -> tuple[int, ...]:
    """All ranks have the same."""
    found = {group.norm_limits for group in groups}  # type: ignore[attr-defined]
    assert len(found) == 1
    return found.pop().up_to


def test_ranks_take_the_first_ones_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{}, {"times": SLOW | {"rows": 20.0}}])
    assert all(isinstance(group, PushCollectives) for group in groups)
    assert [group.limits for group in groups] == [limits_of(1 << 14, 1 << 15)] * 2  # type: ignore[attr-defined]
    assert norm_limits(groups) == (1 << 15,) * 3


@pytest.mark.parametrize("how", ["missing", "wrong"])
def test_one_rank_that_can_not_push_is_enough(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{}, {how: True}, {}])
    assert not any(isinstance(group, PushCollectives) for group in groups)


def test_pushes_that_are_never_faster_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{"times": {"once": 11.0, "twice": 12.0, "rows": 7.0}}, {}])
    assert not any(isinstance(group, PushCollectives) for group in groups)


def test_flashinfer_is_used_for_the_sizes_where_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{"times": FAST}, {"times": FAST | {"apart": 0.1}}], flashinfer=True)
    assert norm_limits(groups) == (0, 1 << 15, 1 << 15)
    assert all(group._flashinfer is not None for group in groups)  # type: ignore[attr-defined]


@pytest.mark.parametrize("wrong", ["sum", "norm", "one number of a rank", "refuses"])
def test_flashinfer_that_is_wrong_on_one_rank_is_not_used(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    own = {"flashinfer": wrong if wrong == "refuses" else ""}
    groups = start_all(monkeypatch, [{"times": FAST} | own, {"flashinfer": wrong}], flashinfer=True)
    rows, once, twice = norm_limits(groups)
    assert rows == once == twice
    assert "FlashInfer in one step came out wrong here, and is not used" in caplog.text
    assert "sums whose norm is wanted: pushed with the norm up to 32 KiB, else a sum, then" in caplog.text


def test_pushes_that_are_slow_do_not_hinder_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = start_all(monkeypatch, [{"times": SLOW | FAST}, {}], flashinfer=True)
    assert groups[0].limits == limits_of(0, 0) and norm_limits(groups)[1] > 0  # type: ignore[attr-defined]


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
