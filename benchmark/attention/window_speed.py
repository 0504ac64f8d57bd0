"""Attention with a window and with sinks on one GPU: right first, then what a window saves.

    python benchmark/attention/window_speed.py            # check, then times
    python benchmark/attention/window_speed.py --check    # the check alone
    python benchmark/attention/window_speed.py --tiny     # small sizes, on any machine

GPT-OSS's attention (64 query heads, 8 KV heads of 64, bf16, page size 1, pages at random, sinks). Decode: one
plan and 24 layers in a CUDA graph, each layer with a pool of its own; microseconds a layer, the plan's part
included. Prefill: chunks of 2048 tokens behind a prefix; microseconds a layer. Window 0 is none.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.attention import (
    AttentionShape,
    DecodeWorkspace,
    View,
    decode_attention,
    plan_decode,
    plan_prefill,
    prefill_attention,
)
from sgl_kernel.attention.decode.reference import decode_attention_ref
from sgl_kernel.attention.prefill.op import prefill_attention_ref
from sgl_kernel.timing import graph_micros

GPT_OSS: Final = AttentionShape(64, 8, 64, 1)
WINDOW: Final = 128
MAX_ERROR: Final = 1e-2  # relative, of bfloat16


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int
    decode: tuple[tuple[int, int], ...]  # rows, places of each
    queries: tuple[int, ...]  # of a row
    chunk: int
    prefixes: tuple[int, ...]


FULL: Final = Sizes(
    24, ((1, 1024), (1, 16384), (1, 65536), (8, 1024), (8, 16384), (64, 1024), (64, 16384)), (1, 4), 2048,
    (0, 14336),
)  # fmt: skip
TINY: Final = Sizes(2, ((1, 200), (3, 300)), (1, 4), 64, (0, 200))


class World:
    """A pool of random keys and values and the pages of R rows, for rows that are ``length`` long."""

    def __init__(self, rows: int, length: int, device: torch.device, pools: int = 1) -> None:
        self.device = device
        self.slots = torch.arange(1, rows + 1, device=device)  # [R]
        self.length = length
        order = torch.randperm(rows * length, device=device).to(torch.int32) + 1
        self.table = torch.zeros(rows + 1, length, dtype=torch.int32, device=device)
        self.table[1:] = order.view(rows, length)
        size = (pools, rows * length + 1, GPT_OSS.num_kv_heads, 2, GPT_OSS.head_dim)
        self.kv = torch.empty(size, dtype=torch.bfloat16, device=device).normal_()
        self.sinks = torch.randn(GPT_OSS.num_heads, device=device).to(torch.bfloat16)

    def queries(self, num: int) -> torch.Tensor:
        """[num, nq, d]"""
        return torch.randn(num, GPT_OSS.num_heads, GPT_OSS.head_dim, device=self.device).to(torch.bfloat16)


def tree_view(rows: int, window: int, device: torch.device) -> View:
    """16 nodes: each sees itself and some of those before it."""
    mask = torch.rand(rows, 16, 16, device=device).tril(-1) > 0.5
    return View(16, 16, mask=mask | torch.eye(16, dtype=torch.bool, device=device), window=window)


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def check(sizes: Sizes, device: torch.device) -> None:
    """Decode rows, trees and chunks against the reference in float32; repeated runs must be equal."""
    rows, length = 3, min(2000, max(places for _, places in sizes.decode))
    world = World(rows, length, device)
    kv = world.kv[0]
    for window in (0, 7, WINDOW, 300):
        views = [View(num, num, causal=True, window=window) for num in (1, 4, 16)]
        for view in (*views, tree_view(rows, window, device)):
            base = torch.tensor([length - 16, 100, 1], device=device)
            plan = plan_decode(DecodeWorkspace(GPT_OSS, device, 2), world.slots, base, world.table, view)
            q = world.queries(rows * view.query_len)
            first, second = (decode_attention(q, kv, plan, sinks=world.sinks) for _ in range(2))
            expected = decode_attention_ref(q.float(), kv.float(), plan, None, None, world.sinks)
            error = error_of(first, expected)
            kind = "chain" if view.mask is None else "tree"
            print(f"check: window {window}, {kind} of {view.query_len}: {error:.1e}")
            assert error < MAX_ERROR and torch.equal(first, second)
        starts, lens = (length - 150, 0, 40), (150, 33, 1)
        chunks = plan_prefill(GPT_OSS, world.table, (1, 2, 3), starts, lens, 2)
        q = world.queries(sum(lens))
        got = prefill_attention(q, kv, chunks, window=window, sinks=world.sinks)
        wanted = prefill_attention_ref(q.float(), kv.float(), chunks, None, window, world.sinks)
        error = error_of(got, wanted)
        print(f"check: window {window}, prefill: {error:.1e}")
        assert error < MAX_ERROR


def micros(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return graph_micros(run, 5, 5)
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6


def decode_times(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    for rows, length in sizes.decode:
        each = rows * length * 2 * GPT_OSS.num_kv_heads * GPT_OSS.head_dim * 2
        world = World(rows, length, device, pools=max(2, min(sizes.layers, int(20e9) // each)))
        for num in sizes.queries:
            q, base = world.queries(rows * num), torch.full_like(world.slots, length - num)
            for window in (0, WINDOW):
                workspace = DecodeWorkspace(GPT_OSS, device, 2)
                view = View(num, num, causal=True, window=window)

                def step(workspace=workspace, view=view, q=q, base=base, world=world) -> None:  # type: ignore[no-untyped-def]
                    plan = plan_decode(workspace, world.slots, base, world.table, view)
                    for layer in range(sizes.layers):
                        decode_attention(q, world.kv[layer % len(world.kv)], plan, sinks=world.sinks)

                us = micros(step, device) / sizes.layers
                yield {"part": "decode", "rows": rows, "places": length, "queries": num, "window": window,
                       "us": round(us, 2)}  # fmt: skip


def prefill_times(sizes: Sizes, device: torch.device) -> Iterator[dict[str, Any]]:
    for prefix in sizes.prefixes:
        world = World(1, prefix + sizes.chunk, device)
        plan = plan_prefill(GPT_OSS, world.table, (1,), (prefix,), (sizes.chunk,), 2)
        q = world.queries(sizes.chunk)
        for window in (0, WINDOW):

            def step(window=window, plan=plan, q=q, world=world) -> None:  # type: ignore[no-untyped-def]
                prefill_attention(q, world.kv[0], plan, window=window, sinks=world.sinks)

            yield {"part": "prefill", "prefix": prefix, "tokens": sizes.chunk, "window": window,
                   "us": round(micros(step, device), 1)}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="no times")
    parser.add_argument("--tiny", action="store_true", help="small sizes; without a GPU the references run")
    parser.add_argument("--out", help="all records, JSON lines")
    args = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("no CUDA device is here: --tiny runs small sizes on the CPU")
    torch.manual_seed(0)
    sizes = TINY if args.tiny else FULL
    print(f"sm_{device_info(device).arch}" if device.type == "cuda" else "references on a CPU")
    check(sizes, device)
    lines = []
    for record in () if args.check else (*decode_times(sizes, device), *prefill_times(sizes, device)):
        print(json.dumps(record), flush=True)
        lines.append(record)
    if args.out:
        with open(args.out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
