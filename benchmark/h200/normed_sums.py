"""Sums over GPUs that are added to the residual stream and normed: by our kernels, and by FlashInfer's.

Part of ``all_reduce.py --flashinfer``. A message is [rows, width]; every way is compared with the sum of all
parts and its norm, in a CUDA graph too, and over the ranks byte by byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmark.h200.executors import Records
from sgl_kernel.communication.flashinfer import FlashInferSums
from sgl_kernel.communication.ops import PushSums
from sgl_kernel.norm.ops import rms_norm
from sglang.srt.distributed.collectives import Collectives
from sglang.srt.distributed.push_collectives import TWICE_BYTES, open_flashinfer
from sglang.srt.distributed.sum_trials import EPS, NormWay, is_normed_sum, norms_are_right, time_norms
from sglang.srt.distributed.tensor_parallel import StreamShape

WIDTHS = (4096, 7168)
PDL_ROWS = 32
EARLY = "_early"
Adding = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Group:
    collectives: Collectives
    sums: PushSums | None
    rank: int
    size: int
    device: torch.device


def run(
    collectives: Collectives,
    sums: PushSums | None,
    store: Any,
    rank: int,
    size: int,
    device: torch.device,
    micros: Callable[[Callable[[], object]], float],
    records: Records,
) -> list[str]:
    """Returns what was wrong. All ranks call it."""
    group, problems = Group(collectives, sums, rank, size, device), []
    flashinfer = None
    if device.type == "cuda":
        shape = StreamShape(max(WIDTHS), torch.bfloat16)
        flashinfer = open_flashinfer(collectives, store, rank, size, device, shape)
        if flashinfer is None and rank == 0:
            print("FlashInfer's kernels can't be had here: they are left out", flush=True)
    for width in WIDTHS if device.type == "cuda" else (256,):
        shape = StreamShape(width, torch.bfloat16)
        ways = ways_of(group, flashinfer)
        for name, way in ways.items():
            if name.endswith(EARLY):  # the copy ahead of a trial writes what it reads too soon
                continue
            if not norms_are_right(way, shape, rank, collectives, device):
                problems.append(f"{name}, rows of {width}: wrong, or ranks differ")
            if device.type == "cuda" and not right_in_graph(group, way, width):
                problems.append(f"{name}, rows of {width}: wrong in a graph")
        times = time_norms(ways, shape, TWICE_BYTES if device.type == "cuda" else 1 << 14, device, micros)
        if rank == 0:
            for num_bytes, of_way in times.items():
                rows = num_bytes // (2 * width)
                records.add("normed_sum", ranks=size, width=width, rows=rows, bytes=num_bytes, micros=of_way)
            print("\n".join(table(records.lines, width)), flush=True)
    return problems


def ways_of(group: Group, flashinfer: FlashInferSums | None) -> dict[str, NormWay]:
    name = "nccl" if group.device.type == "cuda" else "gloo"
    ways = {f"{name} + norm": NormWay(partial(_apart, group.collectives.all_reduce), _always)}
    if group.sums is not None:
        sums, layout = group.sums, group.sums.layout
        ways |= {
            "once + norm": NormWay(partial(_apart, sums.once), partial(_fits, layout.once_bytes), exact=True),
            "twice + norm": NormWay(partial(_apart, sums.twice), partial(_fits, layout.twice_bytes)),
            "rows": NormWay(sums.rows, sums.takes_rows, exact=True),
        }
    if flashinfer is not None:
        for early in (False, True):  # early is no choice of the server's: it would not be safe there
            for kind, twice in (("one", False), ("two", True)):
                add = partial(_by_flashinfer, flashinfer, early, twice)
                ways[f"fi_{kind}{EARLY * early}"] = NormWay(add, partial(flashinfer.takes, twice=twice))
    return ways


def _apart(
    add: Adding, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = add(x, residual)
    return total, rms_norm(total, weight, eps, pdl=len(x) <= PDL_ROWS)


def _by_flashinfer(
    flashinfer: FlashInferSums,
    early: bool,
    twice: bool,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    flashinfer.early = early
    return flashinfer.sum_and_norm(x, residual, weight, eps, twice=twice)


def _fits(most_bytes: int, x: torch.Tensor) -> bool:
    return x.numel() * x.element_size() <= most_bytes


def _always(x: torch.Tensor) -> bool:
    return True


def right_in_graph(group: Group, way: NormWay, width: int) -> bool:
    """A captured sum, replayed with other numbers each time."""
    rows, device, right = 20, group.device, True
    inputs = [torch.zeros(rows, width, dtype=torch.bfloat16, device=device) for _ in range(2)]
    weight = torch.ones(width, dtype=torch.bfloat16, device=device)
    if not way.takes(inputs[0]):
        return True

    def once() -> tuple[torch.Tensor, torch.Tensor]:
        return way.add(inputs[0].clone(), inputs[1].clone(), weight, EPS)

    once()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = once()
    for turn in range(7):
        own = torch.Generator(device).manual_seed(10 * turn + group.rank)
        x = torch.randn(rows, width, device=device, generator=own).bfloat16()
        inputs[0].copy_(x)
        inputs[1].fill_(turn)
        graph.replay()
        parts = group.collectives.all_gather(x)
        right &= is_normed_sum(made, parts, inputs[1], weight, exact=way.exact)
    return right


def table(lines: Sequence[dict[str, Any]], width: int) -> list[str]:
    found = [line for line in lines if line["kind"] == "normed_sum" and line["width"] == width]
    names = list(dict.fromkeys(name for line in found for name in line["micros"]))
    rows = [
        f"| rows of {width} ({found[0]['ranks']} ranks) | {' | '.join(f'{name}, us' for name in names)} |"
    ]
    rows.append("|---|" + "---|" * len(names))
    for line in found:
        cells = [f"{line['micros'][name]:.1f}" if name in line["micros"] else "" for name in names]
        rows.append(f"| {line['rows']} | {' | '.join(cells)} |")
    return rows
