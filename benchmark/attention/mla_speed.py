"""Latent attention (MLA) of decode and verify rows on one GPU: right first, then how fast.

    python benchmark/attention/mla_speed.py                     # 8 heads: Kimi-K2.5 or GLM-5, one of 8 ranks
    python benchmark/attention/mla_speed.py --heads 64 --queries 1 4
    python benchmark/attention/mla_speed.py --sweep --shapes 16x1024 1x65536
    python benchmark/attention/mla_speed.py --tiny              # small caches, on any machine

Latents of 512 numbers and turned keys of 64, bf16, page size 1, places in random order. Times are
microseconds a layer, of a CUDA graph with one plan and many layers over pools that together exceed the cache;
bytes are those of each row's latents, once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.attention import DecodePlan, View, plan_decode
from sgl_kernel.attention.decode.config import DecodeConfig
from sgl_kernel.attention.mla.config import latent_config
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention
from sgl_kernel.attention.mla.reference import latent_attention_ref
from sgl_kernel.launch import compile_ahead
from sgl_kernel.timing import graph_micros

R, ROPE = 512, 64
SCALE = 192**-0.5
LAYERS, REPLAYS, RUNS = 16, 10, 5
SHAPES = {
    f"{rows}x{length}": [length] * rows
    for length, counts in ((1024, (1, 4, 16, 32, 64)), (16384, (1, 4, 16, 32)), (65536, (1, 4, 8)))
    for rows in counts
} | {"31x1024+65536": [1024] * 17 + [65536] + [1024] * 14}
TINY = {"3x100": [100] * 3, "1x300+40": [300, 40]}


@dataclass(frozen=True, slots=True)
class Rows:
    slots: torch.Tensor  # [R] int64
    lens: torch.Tensor  # [R] int64, the queries' own places included
    page_table: torch.Tensor  # [R + 1, max_len] int32
    num_places: int


def make_rows(lens: list[int], device: torch.device) -> Rows:
    table = torch.zeros(len(lens) + 1, max(lens), dtype=torch.int32, device=device)
    order = torch.randperm(sum(lens), device=device).to(torch.int32) + 1
    begin = 0
    for row, length in enumerate(lens, start=1):
        table[row, :length] = order[begin : begin + length]
        begin += length
    slots = torch.arange(1, len(lens) + 1, device=device)
    return Rows(slots, torch.tensor(lens, device=device), table, begin + 1)


class Planner:
    """Makes the step's plan again and again in one workspace, as a backend does."""

    def __init__(
        self,
        rows: Rows,
        num_heads: int,
        query_len: int,
        config: DecodeConfig | None,
        pdl: bool,
        itemsize: int = 2,
    ) -> None:
        self._rows = rows
        self._base_lens = rows.lens - query_len
        self._view = View(query_len, query_len, causal=True)
        device = rows.slots.device
        self._workspace = LatentWorkspace(num_heads, R, 1, device, itemsize, pdl=pdl, config=config)

    def fill(self) -> DecodePlan:
        rows = self._rows
        return plan_decode(self._workspace, rows.slots, self._base_lens, rows.page_table, self._view)


def check(args: argparse.Namespace, queries: Sequence[int], lens: list[int], device: torch.device) -> None:
    """Against the reference in float32, twice: the second run finds the counters used."""
    for query_len in queries:
        rows = make_rows(lens, device)
        plan = Planner(rows, args.heads, query_len, None, args.pdl, args.dtype.itemsize).fill()
        latents = torch.randn(rows.num_places, R + ROPE, device=device).to(args.dtype)
        size = (len(lens) * query_len, args.heads, R + ROPE)
        q = torch.randn(size, device=device).mul_(0.5).to(torch.bfloat16)
        expected = latent_attention_ref(q.float(), latents.float(), plan, SCALE, None)
        first, second = (latent_attention(q, latents, plan, SCALE) for _ in range(2))
        error = float((first.float() - expected).norm() / expected.norm())
        same = torch.equal(first, second)
        print(f"check {args.heads} heads, {query_len} queries: error {error:.1e}, again equal: {same}")
        assert error < 1e-2 and same


def micros(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return graph_micros(run, REPLAYS, RUNS)
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6


def time_layers(
    rows: Rows, num_heads: int, query_len: int, config: DecodeConfig | None, args: argparse.Namespace
) -> float:
    """Microseconds a layer; the plan counts as part of them."""
    device, layers = rows.slots.device, 2 if args.tiny else LAYERS
    # Few pools where they are large: what matters is that together they exceed the cache.
    num_pools = max(2, min(layers, int(20e9) // (rows.num_places * (R + ROPE) * args.dtype.itemsize)))
    pools = torch.empty(num_pools, rows.num_places, R + ROPE, dtype=args.dtype, device=device)
    for pool in pools:
        pool.copy_(torch.randn(pool.shape, dtype=torch.bfloat16, device=device))
    q = torch.randn(len(rows.slots) * query_len, num_heads, R + ROPE, device=device).to(torch.bfloat16)
    out = q.new_empty(*q.shape[:2], R)
    planner = Planner(rows, num_heads, query_len, config, args.pdl, args.dtype.itemsize)

    def step() -> None:
        plan = planner.fill()
        for layer in range(layers):
            latent_attention(q, pools[layer % num_pools], plan, SCALE, out=out)

    return micros(step, device) / layers


def variants(num_heads: int, query_len: int, device: torch.device, itemsize: int) -> list[DecodeConfig]:
    usual = latent_config(device_info(device).arch, query_len, num_heads, R, itemsize)
    found = [usual]
    for block_m, block_n, warps, stages, programs in itertools.product(
        (16, 32, 64), (16, 32, 64), (4, 8), (2, 3, 4), (1, 2)
    ):
        if (block_m > 16 and block_m >= 2 * query_len * num_heads) or block_n * stages * programs > 256:
            continue
        change = {"block_m": block_m, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        found.append(replace(usual, **change, programs_per_sm=programs, max_registers=None))
    return found


def compile_all(
    rows: Rows, query_len: int, configs: Sequence[DecodeConfig], args: argparse.Namespace
) -> None:
    """Every variant of a sweep, many at a time."""
    device = rows.slots.device
    latents = torch.empty(1, R + ROPE, dtype=args.dtype, device=device)
    q = torch.zeros(len(rows.slots) * query_len, args.heads, R + ROPE, dtype=torch.bfloat16, device=device)
    with compile_ahead(os.cpu_count() or 1):
        for config in configs:
            planner = Planner(rows, args.heads, query_len, config, args.pdl, args.dtype.itemsize)
            latent_attention(q, latents, planner.fill(), SCALE)


def measure(name: str, lens: list[int], query_len: int, args: argparse.Namespace) -> None:
    rows = make_rows(lens, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    configs: list[DecodeConfig | None] = [None]
    if args.sweep:
        found = variants(args.heads, query_len, rows.slots.device, args.dtype.itemsize)
        if rows.slots.is_cuda:
            compile_all(rows, query_len, found, args)
        configs = [*found]
    records = []
    for config in configs:
        try:
            us = time_layers(rows, args.heads, query_len, config, args)
        except Exception as failure:  # a variant that does not fit is no reason to stop
            if config is None:
                raise
            print(json.dumps({"shape": name, "failed": repr(failure)[:120], "config": asdict(config)}))
            continue
        read = sum(lens) * (R + ROPE) * args.dtype.itemsize
        flops = sum(lens) * query_len * args.heads * 2 * (2 * R + ROPE)
        records.append(
            {
                "shape": name,
                "cache": args.cache,
                "heads": args.heads,
                "queries": query_len,
                "us": round(us, 1),
                "limit_us": round(read / args.bandwidth / 1e6, 1),
                "TB/s": round(read / us / 1e6, 2),
                "share": round(read / us / 1e6 / args.bandwidth, 3),
                "TFLOP/s": round(flops / us / 1e6, 1),
                "config": None if config is None else asdict(config),
            }
        )
    for record in sorted(records, key=lambda record: float(str(record["us"])))[:6]:
        print(json.dumps(record), flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=8, help="of this rank (default: %(default)s)")
    parser.add_argument("--queries", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--cache", choices=("bfloat16", "fp8_e4m3"), default="bfloat16")
    parser.add_argument("--sweep", action="store_true", help="time other launch constants too")
    parser.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that count as 1 (copying's)")
    parser.add_argument("--tiny", action="store_true", help="small caches; without a GPU the reference runs")
    args = parser.parse_args(argv)
    args.dtype = torch.float8_e4m3fn if args.cache == "fp8_e4m3" else torch.bfloat16
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("no CUDA device is here: --tiny runs small caches on the CPU")
    torch.manual_seed(0)
    lens = [77, 130] if args.tiny else [77, 1152, 3000, 70, 515, 20000]
    check(args, args.queries if args.tiny else (1, 2, 4, 16, 64), lens, device)
    for (name, lens), query_len in itertools.product((TINY if args.tiny else SHAPES).items(), args.queries):
        if args.tiny or name in args.shapes:
            measure(name, lens, query_len, args)


if __name__ == "__main__":
    main()
