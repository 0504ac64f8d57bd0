"""What NCCL is asked for, with Gloo in its place: it needs GPUs.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from sgl_kernel import launch
from sglang.srt.distributed import gpus
from sglang.srt.distributed.collectives import PeerLostError
from sglang.srt.distributed.gpus import open_gpus
from sglang.srt.distributed.nccl import NcclCollectives
from sglang.srt.distributed.shares import ShardingError
from sglang.srt.distributed.tensor_parallel import StreamShape, TensorParallel

CPU = torch.device("cpu")
STREAM = StreamShape(64, torch.bfloat16)


class FakeNccl:
    """Its calls, carried out by Gloo; options are those of torch, so they are checked."""

    Options = SimpleNamespace

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        gloo: Any = dist.ProcessGroupGloo
        settings = gloo._Options()
        settings._devices = [gloo.create_device(interface="lo")]
        settings._timeout = options._timeout
        self._group = gloo(store, rank, size, settings)
        self.num_calls = 0

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device == CPU

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.num_calls += 1
        assert options.asyncOp is False, "on the current stream"
        return self._group.allreduce(tensors, options)

    def _allgather_base(self, out: torch.Tensor, x: torch.Tensor, options: Any) -> Any:
        self.num_calls += 1
        assert options.asyncOp is False
        return self._group._allgather_base(out, x, options)


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)


def test_sums_and_joins() -> None:
    store = dist.HashStore()

    def rank_of(rank: int) -> None:
        group = NcclCollectives(store, rank, 2, CPU)
        x, residual = torch.full((2, 3), float(rank + 1)), torch.ones(2, 3)
        assert torch.equal(group.all_reduce(x.clone(), residual), torch.full((2, 3), 4.0))
        assert torch.equal(group.all_reduce(x.clone()), torch.full((2, 3), 3.0))
        assert torch.equal(group.all_gather(x), torch.stack((torch.ones(2, 3), torch.full((2, 3), 2.0))))
        joining = TensorParallel(rank, 2, group).joining(5)
        assert joining is not None
        assert joining(x).tolist() == [[1.0, 1.0, 1.0, 2.0, 2.0]] * 2

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank_of, range(2)))


def test_nothing_is_sent_while_kernels_are_compiled() -> None:
    group = NcclCollectives(dist.HashStore(), 0, 1, CPU)
    before = group._group.num_calls
    with launch.compile_ahead(1):
        assert group.all_reduce(torch.ones(3)).shape == (3,)
        assert group.all_gather(torch.ones(3)).shape == (1, 3)
    assert group._group.num_calls == before
    group.all_gather(torch.ones(3))
    assert group._group.num_calls == before + 1


def test_the_first_rank_compiles_before_the_others() -> None:
    store, order = dist.HashStore(), []

    def rank_of(rank: int) -> int:
        return TensorParallel(rank, 3, Collective(store, rank)).first_alone(
            lambda: order.append(rank) or rank
        )

    class Collective(NcclCollectives):
        device = "cpu"

        def __init__(self, store: Any, rank: int) -> None:
            super().__init__(store, rank, 3, CPU)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(rank_of, range(3))) == [0, 1, 2]
    assert order[0] == 0 and sorted(order) == [0, 1, 2]


def test_what_can_not_be_connected_is_a_lost_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any, device: torch.device) -> None:
        raise RuntimeError("unhandled system error")

    monkeypatch.setattr(FakeNccl, "eager_connect_single_device", refuse)
    with pytest.raises(PeerLostError, match="NCCL can't connect the GPUs: unhandled system error"):
        NcclCollectives(dist.HashStore(), 0, 1, CPU)


def test_an_error_of_nccl_is_a_lost_peer_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    group = NcclCollectives(dist.HashStore(), 0, 1, CPU)

    def fail(error: Exception) -> None:
        def collective(*args: Any) -> None:
            raise error

        monkeypatch.setattr(FakeNccl, "allreduce", collective)
        monkeypatch.setattr(FakeNccl, "_allgather_base", collective)

    fail(dist.DistBackendError("NCCL communicator was aborted on rank 0"))
    for collective in (group.all_reduce, group.all_gather):
        with pytest.raises(PeerLostError, match="NCCL: NCCL communicator was aborted on rank 0"):
            collective(torch.ones(3))
    fail(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        group.all_reduce(torch.ones(3))


def test_fewer_gpus_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ShardingError, match="--tp-size 4: there are 2 GPUs here"):
        open_gpus(dist.HashStore(), 3, 4, pushes=True, only_fused=False, stream=STREAM)


@pytest.mark.parametrize("pushes", [False, True])
def test_the_thread_is_on_its_gpu_before_anything_else(pushes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(device.index))
    monkeypatch.setattr(gpus, "NcclCollectives", lambda *args: done.append("nccl") or "nccl")
    monkeypatch.setattr(gpus, "with_pushes", lambda nccl, *args, **more: done.append(more) or nccl)
    more: dict[str, Any] = {"only_fused": True, "stream": STREAM, "flashinfer": True}
    assert open_gpus(None, 3, 4, pushes=pushes, **more) == "nccl"
    assert done == [3, "nccl", *([more] if pushes else [])]
