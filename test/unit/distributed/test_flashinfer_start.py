"""How FlashInfer's sums over GPUs are tried, opened and refused, with fakes in the place of its kernels.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed as dist

from sgl_kernel.communication import flashinfer as kernels_module
from sgl_kernel.communication.flashinfer import FlashInferSums
from sgl_kernel.flashinfer_package import FlashInferError
from sgl_kernel.norm.ops import rms_norm_ref
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.distributed import link_check
from sglang.srt.distributed import push_collectives as module
from sglang.srt.distributed.collectives import open_gloo
from sglang.srt.distributed.link_report import (
    LinkCheckConfig,
    LinkReport,
    check_flashinfer,
    read_report,
)
from sglang.srt.distributed.push_collectives import open_flashinfer
from sglang.srt.distributed.tensor_parallel import StreamShape
from sglang.srt.managers import executor_start
from sglang.srt.managers.executor_start import by_links

CPU, BF16 = torch.device("cpu"), torch.bfloat16
STREAM = StreamShape(64, BF16)
ARGS = ExecutorArgs("model", device="cuda", tp_size=4, fuse_all_reduce=True)
GOOD = LinkReport(gpus=4, copies=True, pushes=True, slowest_gbs=50.0)


class Kernels:
    """All ranks are in one process: when the last one has come, every one gets the sum and its norm."""

    def __init__(self, wrong_twice: bool = False) -> None:
        self._wrong_twice = wrong_twice
        self._come: list[tuple[Any, ...]] = []

    def trtllm_allreduce_fusion(self, x: torch.Tensor, size: int, rank: int, *args: Any) -> None:
        assert rank == len(self._come)
        twice, (residual, _, normed), (weight, eps) = not args[4], args[9:12], args[14:16]
        self._come.append((x, residual, normed))
        if len(self._come) < size:
            return
        total = sum(x.float() for x, _, _ in self._come).to(x.dtype)  # type: ignore[union-attr]
        for own, stream, norm in self._come:
            stream.add_(total)
            rms_norm_ref(stream, weight, eps, norm)
            if self._wrong_twice and twice and own is x:
                norm[-1, -1] += 1
        self._come = []


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs that are the host's memory."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(link_check, "_WIDTH", 64)


def test_every_gpus_sum_is_compared(on_host: None) -> None:
    devices = [torch.device("cpu", index) for index in range(4)]
    assert link_check.sum_by_flashinfer(Kernels(), devices) == ""
    wrong = link_check.sum_by_flashinfer(Kernels(wrong_twice=True), devices)
    assert wrong == "a sum by FlashInfer in two steps came out wrong"


@pytest.mark.parametrize("how", ["", "missing", "wrong"])
def test_the_report_says_how_far_the_look_got(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, reports = tmp_path / "report", []

    def load() -> str:
        reports.append(read_report(file))
        if how == "missing":
            raise FlashInferError("no compiler")
        return "kernels"

    def add(kernels: str, devices: list[torch.device]) -> str:
        assert copied == [2], "nothing else opens the way from one GPU to another"
        reports.append(read_report(file))
        return "wrong" if how == "wrong" else ""

    copied = []

    def copy(devices: list[torch.device]) -> tuple[str, float]:
        copied.append(len(devices))
        return "", 1.0

    monkeypatch.setattr(kernels_module, "load_kernels", load)
    monkeypatch.setattr(link_check, "copy_all", copy)
    monkeypatch.setattr(link_check, "sum_by_flashinfer", add)
    report = link_check.look_at_flashinfer(LinkCheckConfig(2, True, True, str(file)))
    assert report.flashinfer == (how == "") and report.why == {"missing": "no compiler"}.get(how, how)
    assert [old.doing for old in reports] == ["sums by FlashInfer's kernels"] * (1 if how == "missing" else 2)


def test_ranks_that_its_kernels_are_not_for(tmp_path: Path) -> None:
    report = link_check.look_at_flashinfer(LinkCheckConfig(6, True, True, str(tmp_path / "report")))
    assert report.why == "its kernels are for 2, 4, 8, 16 ranks, not for 6"


LOOK = """
import sys, time
from pathlib import Path
import msgspec
from sglang.srt.distributed.link_report import LinkCheckConfig, LinkReport, write_report
from sglang.srt.utils.child_process import read_config

config = msgspec.msgpack.decode(read_config(), type=LinkCheckConfig)
assert config.flashinfer
{then}
"""


@pytest.mark.parametrize(
    "then, why",
    [
        ("write_report(Path(config.file), LinkReport(flashinfer=True))", ""),
        (
            "write_report(Path(config.file), LinkReport(doing='sums')); time.sleep(60)",
            "the check had not ended after 2 s (sums)",
        ),
    ],
)
def test_the_look_has_a_limit(then: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "faked_sums.py").write_text(LOOK.format(then=then))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    report = check_flashinfer(2, limit_s=2.0, module="faked_sums")
    assert (report.why, report.flashinfer) == (why, not why)


@pytest.mark.parametrize(
    "found, used, says",
    [
        (
            LinkReport(flashinfer=True, seconds=9.0), True,
            "FlashInfer's sums over the GPUs: tried in 9.0 s",
        ),
        (LinkReport(why="no compiler"), False, "FlashInfer's kernels are not used (no compiler); sums are"),
    ],
)  # fmt: skip
def test_what_was_found_decides(
    found: LinkReport,
    used: bool,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(executor_start, "check_links", lambda size, pushes: GOOD)
    monkeypatch.setattr(executor_start, "check_flashinfer", lambda size: found)
    caplog.set_level("INFO")
    args, _ = by_links(ARGS, {})
    assert args.flashinfer_sums == used and args.fuse_all_reduce
    assert says in caplog.records[-1].getMessage()


@pytest.mark.parametrize("report", [msgspec.structs.replace(GOOD, pushes=False), LinkReport(gpus=4)])
def test_it_is_not_tried_over_links_that_are_broken(
    report: LinkReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_start, "check_links", lambda size, pushes: report)
    monkeypatch.setattr(executor_start, "check_flashinfer", lambda size: pytest.fail("tried"))
    args, _ = by_links(ARGS, {})
    assert not args.flashinfer_sums and not args.fuse_all_reduce


class Ipc:
    """Of ranks that are threads: an address is what it is."""

    blocks: dict[int, torch.Tensor] = {}
    broken: int | None = None  # thread's rank
    local = threading.local()

    def allocate(self, num_bytes: int) -> int:
        if self.local.rank == self.broken:
            raise module.IpcError("no memory")
        block = torch.full((num_bytes,), 9, dtype=torch.uint8)
        self.blocks[block.data_ptr()] = block
        return block.data_ptr()

    def export(self, address: int) -> bytes:
        return str(address).encode()

    def open(self, exported: bytes) -> int:
        return int(exported)


def opened(monkeypatch: pytest.MonkeyPatch, stream: StreamShape = STREAM, **how: Any) -> list[Any]:
    """``how``: the rank that can't load its kernels, or share its memory."""
    store = dist.HashStore()
    groups: list[Any] = []

    def load() -> str:
        if Ipc.local.rank == how.get("no_kernels"):
            raise FlashInferError("no compiler")
        return "kernels"

    def start(rank: int) -> FlashInferSums | None:
        Ipc.local.rank = rank
        group = open_gloo(store, rank, 2)
        groups.append(group)  # one that is dropped closes while the other still connects
        return open_flashinfer(group, store, rank, 2, CPU, stream)

    monkeypatch.setattr(Ipc, "broken", how.get("no_memory"))
    monkeypatch.setattr(module, "CudaIpc", Ipc)
    monkeypatch.setattr(module, "as_tensor", lambda address, num_bytes, device: Ipc.blocks[address])
    monkeypatch.setattr(module, "load_kernels", load)
    monkeypatch.setattr(module, "TWICE_BYTES", 1 << 14)
    monkeypatch.setattr(module, "FLASHINFER_ONCE_BYTES", 1 << 12)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(start, range(2)))


def test_all_ranks_name_the_same_places_and_their_own_state(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (sums._workspace.tolist() for sums in opened(monkeypatch))
    assert first[:-1] == second[:-1] and first[-1] != second[-1]
    layout = module.FlashInferLayout(2, 1 << 12, 1 << 14)
    for address in first[:2]:
        parts = Ipc.blocks[address][layout.parts :].view(BF16)
        assert (parts == 0).all() and parts.signbit().all(), "prepared before others see it"


@pytest.mark.parametrize(
    "how, says",
    [
        ({"no_kernels": 1}, "FlashInfer makes no sums over the GPUs: rank 1: no compiler"),
        ({"no_memory": 1}, "rank 1 can't share its GPU's memory: no memory"),
        ({"stream": StreamShape(64, torch.float32)}, "not for torch.float32"),
    ],
)
def test_one_rank_that_can_not_is_enough(
    how: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert opened(monkeypatch, **how) == [None, None]
    assert says in caplog.text
