"""Decode attention of sgl_kernel on one GPU: right first, then how fast.

    python benchmark/attention/decode_speed.py              # check, then the table's constants
    python benchmark/attention/decode_speed.py --sweep      # and other constants for every shape

Llama-3.1-8B's attention (32 query heads, 8 KV heads of 128, bf16, page size 1, pages at random), one plan
and 32 layers in a CUDA graph, each layer with a pool of its own. Bytes are K and V of all rows, read once;
the share is of 4.3 TB/s, what an H200 copies at (--bandwidth).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from dataclasses import asdict, dataclass, replace

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.attention import (
    AttentionShape,
    DecodePlan,
    DecodeWorkspace,
    View,
    decode_attention,
    plan_decode,
)
from sgl_kernel.attention.decode.config import DecodeConfig, decode_config
from sgl_kernel.attention.decode.reference import decode_attention_ref
from sgl_kernel.launch import compile_ahead
from sgl_kernel.timing import graph_micros

SHAPE = AttentionShape(32, 8, 128, 1)
LAYERS, REPEATS, RUNS = 32, 10, 5
SHAPES = {
    "1x1152": [1152],
    "4x1152": [1152] * 4,
    "16x1152": [1152] * 16,
    "32x1152": [1152] * 32,
    "64x1152": [1152] * 64,
    "128x1152": [1152] * 128,
    "16x2048": [2048] * 16,
    "64x8192": [8192] * 64,
    "1x65536": [65536],
    "31x1152+65536": [1152] * 17 + [65536] + [1152] * 14,
}


@dataclass(frozen=True, slots=True)
class Rows:
    slots: torch.Tensor  # [R] int64
    base_lens: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [R + 1, max_len] int32
    num_places: int


def make_rows(lens: list[int], room: int, device: torch.device) -> Rows:
    longest = max(lens) + room
    table = torch.zeros(len(lens) + 1, longest, dtype=torch.int32, device=device)
    order = torch.randperm(sum(lens) + room * len(lens), device=device).to(torch.int32) + 1
    begin = 0
    for row, length in enumerate(lens, start=1):
        table[row, : length + room] = order[begin : begin + length + room]
        begin += length + room
    slots = torch.arange(1, len(lens) + 1, device=device)
    return Rows(slots, torch.tensor(lens, device=device), table, begin + 1)


def make_plan(rows: Rows, query_len: int, config: DecodeConfig | None, pdl: bool) -> DecodePlan:
    """Lengths are those of K and V in all: the queries' own places are the last ones."""
    device = rows.slots.device
    workspace = DecodeWorkspace(SHAPE, device, 2, pdl=pdl, config=config)
    view = View(query_len, query_len, causal=True)
    return plan_decode(workspace, rows.slots, rows.base_lens - query_len, rows.page_table, view)


def check(device: torch.device, pdl: bool) -> None:
    """Random lengths against the reference in float32, twice: the second run finds the counters used."""
    for query_len, dtype in itertools.product((1, 4, 16, 64), (torch.bfloat16, torch.float16)):
        lens = [77, 1152, 3000, 70, 515, 20000]
        rows = make_rows(lens, 0, device)
        plan = make_plan(rows, query_len, None, pdl)
        kv = torch.randn(rows.num_places, 8, 2, 128, device=device).to(dtype)
        q = torch.randn(len(lens) * query_len, 32, 128, device=device).to(dtype)
        expected = decode_attention_ref(q.float(), kv.float(), plan, None, None)
        first, second = (decode_attention(q, kv, plan) for _ in range(2))
        error = float((first.float() - expected).norm() / expected.norm())
        same = torch.equal(first, second)
        print(f"check Q={query_len} {dtype}: relative error {error:.1e}, repeated run equal: {same}")
        assert error < 5e-3 and same


def time_layers(rows: Rows, query_len: int, config: DecodeConfig | None, pdl: bool) -> float:
    """Microseconds a layer, the best of some runs; the plan counts as part of the 32 layers."""
    device, num_rows = rows.slots.device, rows.slots.shape[0]
    # Few pools where they are large: what matters is that together they exceed the cache.
    bytes_each = rows.num_places * SHAPE.num_kv_heads * 2 * SHAPE.head_dim * 2
    num_pools = max(2, min(LAYERS, int(40e9) // bytes_each))
    pools = torch.empty(num_pools, rows.num_places, 8, 2, 128, dtype=torch.bfloat16, device=device).normal_()
    q = torch.randn(num_rows * query_len, 32, 128, device=device).to(torch.bfloat16)
    out = torch.empty_like(q)

    def step() -> None:
        plan = plans.fill()
        for layer in range(LAYERS):
            decode_attention(q, pools[layer % num_pools], plan, out=out)

    plans = _Planner(rows, query_len, config, pdl)
    return graph_micros(step, REPEATS, RUNS) / LAYERS


class _Planner:
    """Makes the step's plan again and again in one workspace, as a backend does."""

    def __init__(self, rows: Rows, query_len: int, config: DecodeConfig | None, pdl: bool) -> None:
        self._rows = rows
        self._base_lens = rows.base_lens - query_len
        self._view = View(query_len, query_len, causal=True)
        self._workspace = DecodeWorkspace(SHAPE, rows.slots.device, 2, pdl=pdl, config=config)

    def fill(self) -> DecodePlan:
        rows = self._rows
        return plan_decode(self._workspace, rows.slots, self._base_lens, rows.page_table, self._view)


def variants(query_len: int, device: torch.device) -> list[DecodeConfig]:
    """The table's constants and what lies around them; with several programs an SM what fits beside them."""
    usual = decode_config(device_info(device).arch, query_len * SHAPE.group, SHAPE.head_dim, 2)
    found = [usual]
    for (block_n, warps), stages, programs in itertools.product(
        ((32, 2), (32, 4), (64, 2), (64, 4), (128, 4), (128, 8)), (2, 3, 4), (2, 3, 4, 6, 8)
    ):
        bytes_held = (stages - 1 + 1) * block_n * SHAPE.head_dim * 4 * programs
        if not 64 * 1024 <= bytes_held <= 220 * 1024 and programs > 2:
            continue
        found.append(
            replace(usual, block_n=block_n, num_warps=warps, num_stages=stages, programs_per_sm=programs)
        )
    return found


def compile_all(shapes: list[str], queries: list[int], pdl: bool, device: torch.device) -> None:
    """Every variant of a sweep, many at a time."""
    q = torch.zeros(64, 32, 128, device=device, dtype=torch.bfloat16)
    with compile_ahead(os.cpu_count() or 1):
        for name, query_len in itertools.product(shapes, queries):
            rows = make_rows(SHAPES[name], 0, device)
            kv = torch.empty(1, 8, 2, 128, device=device, dtype=torch.bfloat16)
            num_tokens = rows.slots.shape[0] * query_len
            for config in variants(query_len, device):
                plan = make_plan(rows, query_len, config, pdl)
                decode_attention(q.repeat(-(-num_tokens // 64), 1, 1)[:num_tokens], kv, plan)


def report(name: str, query_len: int, config: DecodeConfig | None, micros: float, bandwidth: float) -> None:
    read = sum(SHAPES[name]) * 4096 / micros / 1e6  # TB/s
    line = {"shape": name, "queries": query_len, "us": round(micros, 1), "TB/s": round(read, 2)}
    line["share"] = round(read / bandwidth, 3)
    line["config"] = None if config is None else asdict(config)
    print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--queries", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that count as 100 %%")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    check(device, args.pdl)
    if args.sweep:
        compile_all(args.shapes, args.queries, args.pdl, device)
    for name, query_len in itertools.product(args.shapes, args.queries):
        rows = make_rows(SHAPES[name], 0, device)
        configs = variants(query_len, device) if args.sweep else [None]
        for config in configs:
            try:
                micros = time_layers(rows, query_len, config, args.pdl)
            except Exception as error:  # a variant that does not fit is no reason to stop
                print(json.dumps({"shape": name, "queries": query_len, "failed": repr(error)[:120]}))
                continue
            report(name, query_len, config, micros, args.bandwidth)


if __name__ == "__main__":
    main()
