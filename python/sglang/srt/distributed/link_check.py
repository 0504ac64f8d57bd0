"""Tries the links of the GPUs: copies between every two of them, then sums by our own kernels over all.

Run by ``link_report.check_links``. One process holds all GPUs here, so no memory need be shared.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import torch

from sglang.srt.distributed.link_report import LinkCheckConfig, LinkReport, write_report
from sglang.srt.utils.child_process import read_config

_COPIED: Final = 1 << 21  # int32: 8 MiB
_SUMMED: Final = (1000, 1 << 16)


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
    """Sums of both kinds over all GPUs, a few in turn; empty, or what came out wrong."""
    from sgl_kernel.communication.layout import MAX_RANKS, PushLayout
    from sgl_kernel.communication.ops import PushSums, sum_ref

    if len(devices) > MAX_RANKS:
        return f"sums over more than {MAX_RANKS} GPUs are NCCL's"
    layout = PushLayout(len(devices), 1 << 18, 1 << 20)
    blocks = [torch.zeros(layout.total_bytes + 4096, dtype=torch.uint8, device=d) for d in devices]
    addresses = [-(-block.data_ptr() // 4096) * 4096 for block in blocks]
    ranks = [PushSums(rank, addresses, layout, device) for rank, device in enumerate(devices)]
    for turn in range(3):
        for numel in _SUMMED:
            parts = torch.randn(len(devices), numel, generator=torch.Generator().manual_seed(turn)).bfloat16()
            for twice in (False, True):
                on_gpus = [part.to(device) for part, device in zip(parts, devices, strict=True)]
                for device in devices:
                    torch.cuda.synchronize(device)
                for rank, x in zip(ranks, on_gpus, strict=True):
                    with torch.cuda.device(x.device):
                        (rank.twice if twice else rank.once)(x)
                wanted = sum_ref(parts, twice=twice)
                if any(not torch.equal(x.cpu(), wanted) for x in on_gpus):
                    return (
                        f"a sum of {numel} numbers in {'two steps' if twice else 'one step'} came out wrong"
                    )
    return ""


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
    write_report(Path(config.file), look(config))
    return 0


if __name__ == "__main__":
    sys.exit(main())
