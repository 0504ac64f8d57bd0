"""Sums over GPUs: how long each way takes by size, whether it is right, and whether all ranks get the same.

    python benchmark/h200/all_reduce.py --ranks 2 --out all_reduce.jsonl
    python benchmark/h200/all_reduce.py --ranks 2 --flashinfer   # sums with their norm too (normed_sums.py)

A process for each rank. A message is added to a residual, as a layer does it, 8 times in a CUDA graph; the
figure is microseconds of one. With ``--device cpu`` Gloo is the only way, and its time is the host's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmark.h200 import normed_sums
from benchmark.h200.executors import Records, add_common_flags, device_name
from sgl_kernel.communication.flashinfer import load_kernels
from sgl_kernel.communication.layout import PushLayout
from sgl_kernel.communication.ops import PushSums, sum_ref
from sglang.srt.distributed.collectives import Collectives, file_store, open_gloo

LIMIT_S = 120.0
SIZES = tuple(4096 << i for i in range(12))  # bytes: 4 KiB to 8 MiB
Way = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Ways:
    """Of one rank, by name, with the bytes each takes at most."""

    def __init__(self, store: Any, rank: int, size: int, device: str) -> None:
        self.group: Collectives
        self.sums: PushSums | None = None
        self.refused = ""
        if device == "cpu":
            self.group = open_gloo(store, rank, size)
            self.ways: dict[str, tuple[Way, int]] = {"gloo": (self.group.all_reduce, SIZES[-1])}
            self.micros: Callable[[Callable[[], object]], float] = _host_micros
            return
        from sgl_kernel.timing import graph_micros
        from sglang.srt.distributed.nccl import NcclCollectives
        from sglang.srt.distributed.push_collectives import ONCE_BYTES, TWICE_BYTES, share

        gpu = torch.device("cuda", rank)
        torch.cuda.set_device(gpu)
        self.group = NcclCollectives(store, rank, size, gpu)
        self.ways = {"nccl": (self.group.all_reduce, SIZES[-1])}
        self.micros = lambda run: graph_micros(run, 4, 5)
        sums = share(store, rank, PushLayout(size, ONCE_BYTES, TWICE_BYTES), gpu)
        if sums is None:
            self.refused = "the GPUs' memory can't be shared: pushes are left out"
            return
        self.sums = sums
        self.ways |= {"once": (sums.once, ONCE_BYTES), "twice": (sums.twice, TWICE_BYTES)}

    def add_torch(self, store: Any, rank: int, size: int) -> None:
        """Torch's own sums over symmetric memory, without multicast, to compare."""
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric

        gpu = torch.device("cuda", rank)
        store = dist.PrefixStore("torch", store)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=gpu)
        name = dist.group.WORLD.group_name  # type: ignore[union-attr]
        memory = symmetric.empty(SIZES[-1] // 2, dtype=torch.bfloat16, device=gpu)
        symmetric.rendezvous(memory, name)
        ops = torch.ops.symm_mem

        def one_shot(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            own = memory[: x.numel()].copy_(x)
            return residual.add_(ops.one_shot_all_reduce(own, "sum", name))

        def two_shot(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
            own = memory[: x.numel()].copy_(x)
            return residual.add_(ops.two_shot_all_reduce_(own, "sum", name))

        self.ways |= {"torch_one": (one_shot, SIZES[-1]), "torch_two": (two_shot, SIZES[-1])}


def _host_micros(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - began)


def problems_of(way: Way, name: str, numel: int, rank: int, group: Collectives) -> list[str]:
    """Against the sum of all parts in the order of ranks: the same bytes for pushes, close for libraries."""
    device = torch.device("cpu" if group.device == "cpu" else f"cuda:{rank}")
    generator = torch.Generator(device).manual_seed(numel + rank)
    x = torch.randn(numel, device=device, generator=generator).bfloat16()
    parts, residual = group.all_gather(x), torch.full_like(x, 0.5)
    got = way(x.clone(), residual.clone())
    wanted = sum_ref(parts, residual, twice=name == "twice")
    found = []
    if name in ("once", "twice") and not torch.equal(got, wanted):
        found.append(f"{name}, {2 * numel} bytes: {int((got != wanted).sum())} of {numel} numbers are wrong")
    if not torch.allclose(got.float(), wanted.float(), rtol=2**-5, atol=2**-5):
        found.append(f"{name}, {2 * numel} bytes: off by {float((got.float() - wanted.float()).abs().max())}")
    of_all = group.all_gather(got)
    if not all(torch.equal(of_all[0], other) for other in of_all):
        found.append(f"{name}, {2 * numel} bytes: ranks differ")
    return found


def run_rank(
    rank: int, size: int, meeting: str, device: str, out: Path | None, torchs: bool, flashinfer: bool
) -> int:
    store = file_store(meeting, size)
    ways = Ways(store, rank, size, device)
    if torchs and device == "cuda":
        ways.add_torch(store, rank, size)
    records = Records(out if rank == 0 else None, device_name(device))
    if ways.refused and rank == 0:
        print(ways.refused)
    problems: list[str] = []
    for num_bytes in SIZES:
        micros: dict[str, float] = {}
        for name, (way, most) in ways.ways.items():
            if num_bytes > most:
                continue
            odd = 0 if name.startswith("torch") else 5  # it takes whole vectors only
            for numel in (num_bytes // 2, num_bytes // 2 - odd):
                problems += problems_of(way, name, numel, rank, ways.group)
            x = torch.zeros(
                num_bytes // 2, dtype=torch.bfloat16, device=f"cuda:{rank}" if device == "cuda" else "cpu"
            )
            residual = torch.zeros_like(x)

            def eight(way: Way = way, x: torch.Tensor = x, residual: torch.Tensor = residual) -> None:
                for _ in range(8):
                    way(x, residual)

            micros[name] = ways.micros(eight) / 8
        if rank == 0:
            records.add("all_reduce", ranks=size, bytes=num_bytes, micros=micros)
    if rank == 0:
        print("\n".join(table(records.lines)), flush=True)
    if flashinfer:
        gpu = torch.device("cpu") if device == "cpu" else torch.device("cuda", rank)
        problems += normed_sums.run(ways.group, ways.sums, store, rank, size, gpu, ways.micros, records)
    for problem in problems:
        print(f"rank {rank}: WRONG: {problem}")
    return 1 if problems else 0


def table(lines: Sequence[dict[str, Any]]) -> list[str]:
    found = [line for line in lines if line["kind"] == "all_reduce"]
    names = sorted({name for line in found for name in line["micros"]})
    rows = [f"| bytes ({found[0]['ranks']} ranks) | {' | '.join(f'{name}, us' for name in names)} |"]
    rows.append("|---|" + "---|" * len(names))
    for line in found:
        cells = [f"{line['micros'][name]:.1f}" if name in line["micros"] else "" for name in names]
        rows.append(f"| {line['bytes']} | {' | '.join(cells)} |")
    return rows


def run_all(size: int, device: str, out: Path | None, torchs: bool = False, flashinfer: bool = False) -> int:
    """Every rank in a process; returns how many have failed."""
    with tempfile.TemporaryDirectory(prefix="all_reduce_") as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--ranks", str(size), "--device", device]
        command += ["--meeting", str(Path(folder) / "meeting")]
        command += [] if out is None else ["--out", str(out)]
        command += ["--torch"] if torchs else []
        command += ["--flashinfer"] if flashinfer else []
        if flashinfer and device == "cuda":
            load_kernels(build=True)  # before ranks that each would compile them
        ranks = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(size)]
        deadline, failed = time.monotonic() + LIMIT_S, 0
        for rank in ranks:
            try:
                failed += rank.wait(max(0.0, deadline - time.monotonic())) != 0
            except subprocess.TimeoutExpired:
                print(f"a rank had not ended after {LIMIT_S:.0f} s")
                rank.kill()
                failed += 1
    return failed


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--torch", action="store_true", help="torch's sums over symmetric memory as well")
    parser.add_argument(
        "--flashinfer", action="store_true", help="sums with their RMS norm, by FlashInfer's kernels as well"
    )
    parser.add_argument("--rank", type=int, help="be this rank; the script starts itself for each")
    parser.add_argument("--meeting", help="a file where the ranks meet; with --rank")
    args = parser.parse_args(argv)
    if args.rank is not None:
        return run_rank(
            args.rank, args.ranks, args.meeting, args.device, args.out, args.torch, args.flashinfer
        )
    return 1 if run_all(args.ranks, args.device, args.out, args.torch, args.flashinfer) else 0


if __name__ == "__main__":
    sys.exit(main())
