"""Tries the links of the GPUs: copies between every two of them, then sums by our own kernels over all; or
sums by FlashInfer's.

Run by ``link_report.check_links``. One process holds all GPUs here, so no memory need be shared.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from sglang.srt.distributed.link_report import LinkCheckConfig, LinkReport, write_report
from sglang.srt.utils.child_process import read_config

_COPIED: Final = 1 << 21  # int32: 8 MiB
_SUMMED: Final = (1000, 1 << 16)
_WIDTH: Final = 4096  # of the rows that FlashInfer's kernels add


def pattern(device: torch.device, seed: int) -> torch.Tensor:
    """[_COPIED] int32, another one for every seed."""
    return torch.arange(_COPIED, dtype=torch.int32, device=device) * (2 * seed + 1) + seed


def unreachable(devices: Sequence[torch.device]) -> str:
    """The first two GPUs of which one can't see the other's memory; empty if there are none."""
    for here in devices:
        for there in devices:
            if here != there and not torch.cuda.can_device_access_peer(here, there):
                return f"GPU {here.index} can't reach the memory of GPU {there.index}"
    return ""


def copy_all(devices: Sequence[torch.device]) -> tuple[str, float]:
    """Each GPU's pattern to every other one: the first copy that came out wrong, and the slowest's GB/s."""
    slowest = float("inf")
    for here in devices:
        for there in devices:
            if here == there:
                continue
            seed = len(devices) * here.index + there.index
            sent, wanted = pattern(here, seed), pattern(there, seed)
            arrived = torch.zeros_like(wanted)
            for device in (here, there):
                torch.cuda.synchronize(device)
            seconds = _timed_copy(sent, arrived)
            if not torch.equal(arrived, wanted):
                return f"a copy from GPU {here.index} to GPU {there.index} came out wrong", 0.0
            slowest = min(slowest, sent.numel() * sent.element_size() / seconds / 1e9)
    return "", slowest


def _timed_copy(sent: torch.Tensor, arrived: torch.Tensor) -> float:
    """The second copy counts: the first one opens the way."""
    seconds = 0.0
    for _ in range(2):
        with torch.cuda.device(sent.device):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            arrived.copy_(sent, non_blocking=True)
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1000
        torch.cuda.synchronize(arrived.device)
    return max(seconds, 1e-9)


def sum_all(devices: Sequence[torch.device]) -> str:
    """Sums of both kinds over all GPUs, a few in turn; empty, or what came out wrong.

    The kernels are those that the server will use, so they are compiled when it starts.
    """
    from sgl_kernel.communication.layout import MAX_RANKS, PushLayout
    from sgl_kernel.communication.ops import PushSums, sum_ref
    from sgl_kernel.launch import compile_ahead
    from sglang.srt.distributed.push_collectives import ONCE_BYTES, TWICE_BYTES

    if len(devices) > MAX_RANKS:
        return f"sums over more than {MAX_RANKS} GPUs are NCCL's"
    layout = PushLayout(len(devices), ONCE_BYTES, TWICE_BYTES)
    blocks = [torch.zeros(layout.total_bytes + 4096, dtype=torch.uint8, device=d) for d in devices]
    addresses = [-(-block.data_ptr() // 4096) * 4096 for block in blocks]
    ranks = [PushSums(rank, addresses, layout, device) for rank, device in enumerate(devices)]

    def run(xs: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor], twice: bool) -> None:
        for rank, x, residual in zip(ranks, xs, residuals, strict=True):
            with torch.cuda.device(x.device):
                (rank.twice if twice else rank.once)(x, residual)

    some = [torch.zeros(64, dtype=torch.bfloat16, device=device) for device in devices]
    with compile_ahead(min(16, os.cpu_count() or 1)):
        for twice in (False, True):
            run(some, some, twice)
    for turn in range(3):
        for numel in _SUMMED:
            parts = torch.randn(len(devices), numel, generator=torch.Generator().manual_seed(turn)).bfloat16()
            for twice in (False, True):
                xs = [part.to(device) for part, device in zip(parts, devices, strict=True)]
                sums = [torch.ones_like(x) for x in xs]
                _synchronize(devices)  # no rank may wait for another while this one is made ready
                run(xs, sums, twice)
                wanted = sum_ref(parts, torch.ones_like(parts[0]), twice=twice)
                if any(not torch.equal(total.cpu(), wanted) for total in sums):
                    return (
                        f"a sum of {numel} numbers in {'two steps' if twice else 'one step'} came out wrong"
                    )
    return ""


def sum_by_flashinfer(kernels: Any, devices: Sequence[torch.device]) -> str:
    """Sums with a norm over all GPUs in one step and in two, a few in turn; empty, or what came out wrong."""
    from sgl_kernel.communication.flashinfer import FlashInferLayout, FlashInferSums
    from sglang.srt.distributed.sum_trials import EPS, is_normed_sum

    size = len(devices)
    rows = 2 * size + 1
    layout = FlashInferLayout(size, 1 << 20, 1 << 20)
    blocks = [torch.empty(layout.total_bytes, dtype=torch.uint8, device=device) for device in devices]
    addresses = [block.data_ptr() for block in blocks]
    ranks = [FlashInferSums(kernels, rank, addresses, layout, device) for rank, device in enumerate(devices)]

    def run(parts: torch.Tensor, twice: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """parts: [size, T, H] -> every rank's sum and norm; stream and weight are ones."""
        of_ranks = [
            (part.to(device), torch.ones_like(part, device=device))
            for part, device in zip(parts, devices, strict=True)
        ]
        weights = [torch.ones(_WIDTH, dtype=parts.dtype, device=device) for device in devices]
        norms = [torch.empty_like(x) for x, _ in of_ranks]  # now: nothing is allocated while a rank waits
        _synchronize(devices)
        made = []
        for rank, (x, residual), weight, norm in zip(ranks, of_ranks, weights, norms, strict=True):
            with torch.cuda.device(x.device):
                made.append(rank.sum_and_norm(x, residual, weight, EPS, twice=twice, normed=norm))
        _synchronize(devices)
        return made

    for waits in (False, True):  # first all are loaded by a sum that waits for nobody
        for rank, block in zip(ranks, blocks, strict=True):
            layout.prepare(block, waits=waits)
            rank.reset()
        for turn in range(4 if waits else 1):
            seed = torch.Generator().manual_seed(turn)
            parts = torch.randn(size, rows, _WIDTH, generator=seed).bfloat16()
            for twice in (False, True):
                made = run(parts, twice)
                ones = torch.ones_like(parts[0])
                alike = [(total.cpu(), normed.cpu()) for total, normed in made]
                right = all(is_normed_sum(got, parts, ones, ones[0], exact=False) for got in alike)
                if waits and not right:
                    return f"a sum by FlashInfer in {'two steps' if twice else 'one step'} came out wrong"
    return ""


def look_at_flashinfer(config: LinkCheckConfig) -> LinkReport:
    from sgl_kernel.communication.flashinfer import load_kernels, why_not
    from sgl_kernel.flashinfer_package import FlashInferError

    report = LinkReport(gpus=config.size, copies=True, pushes=True, doing="sums by FlashInfer's kernels")
    if why := why_not(config.size, _WIDTH, torch.bfloat16):
        return msgspec.structs.replace(report, why=why)
    write_report(Path(config.file), report)
    try:
        kernels = load_kernels()
    except FlashInferError as error:
        return msgspec.structs.replace(report, why=str(error))
    devices = [torch.device("cuda", index) for index in range(config.size)]
    why, _ = copy_all(devices)  # by which this process may reach each GPU's memory from every other one
    why = why or sum_by_flashinfer(kernels, devices)
    return msgspec.structs.replace(report, flashinfer=not why, why=why)


def _synchronize(devices: Sequence[torch.device]) -> None:
    for device in devices:
        torch.cuda.synchronize(device)


def look(config: LinkCheckConfig) -> LinkReport:
    file, count = Path(config.file), torch.cuda.device_count()
    report = LinkReport(gpus=count, doing="copies between GPUs")
    write_report(file, report)
    if count < config.size:
        return msgspec.structs.replace(report, why=f"there are {count} GPUs")
    devices = [torch.device("cuda", index) for index in range(config.size)]
    if why := unreachable(devices):
        return msgspec.structs.replace(report, reachable=False, why=why)
    why, slowest = copy_all(devices)
    if why:
        return msgspec.structs.replace(report, why=why)
    report = msgspec.structs.replace(report, copies=True, slowest_gbs=slowest, doing="sums over GPUs")
    write_report(file, report)
    if not config.pushes:
        return report
    why = sum_all(devices)
    return msgspec.structs.replace(report, pushes=not why, why=why)


def main() -> int:
    config = msgspec.msgpack.decode(read_config(), type=LinkCheckConfig)
    report = look_at_flashinfer(config) if config.flashinfer else look(config)
    write_report(Path(config.file), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
