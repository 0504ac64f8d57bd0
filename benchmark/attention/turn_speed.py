"""Decode attention that turns and writes by itself, against a launch ahead of it, on one GPU.

    python benchmark/attention/turn_speed.py            # check, then microseconds a layer of both ways
    python benchmark/attention/turn_speed.py --pdl      # with programmatic dependent launch

The check: the same cache, bit for bit without norms, and the same output, on random lengths, positions,
masks and page sizes. Timed are the product of the 8B model's qkv and what follows it, 32 layers in a CUDA
graph: between the two ways lies a launch a layer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.attention.decode_speed import LAYERS, REPEATS, RUNS, SHAPE, Rows, make_rows
from sgl_kernel.attention import (
    AttentionShape,
    DecodePlan,
    DecodeWorkspace,
    Turn,
    View,
    can_turn,
    decode_attention,
    plan_decode,
)
from sgl_kernel.rope.ops import CachePlaces, HeadNorms, RopeTables, TokenRows, rope_cache_write
from sgl_kernel.timing import graph_micros

MAX_POSITION = 40_000
CHECKED = (AttentionShape(32, 8, 128, 1), AttentionShape(9, 3, 64, 1), AttentionShape(32, 8, 128, 16))
BATCHES = {"1x1152": [1152], "4x1152": [1152] * 4, "16x1152": [1152] * 16, "64x1152": [1152] * 64}


@dataclass(frozen=True, slots=True)
class Step:
    plan: DecodePlan
    turn: Turn
    token_slots: torch.Tensor  # [T] int64

    def fused(self, kv: torch.Tensor) -> torch.Tensor:
        return decode_attention(None, kv, self.plan, turn=self.turn)

    def two_launches(self, kv: torch.Tensor) -> torch.Tensor:
        shape, writes, turn = self.plan.shape, self.plan.view.writes, self.turn
        q = turn.qkv.new_empty(turn.qkv.shape[0], shape.num_heads * shape.head_dim)
        rope_cache_write(
            turn.qkv,
            shape.num_heads,
            shape.num_kv_heads if writes else 0,
            turn.tables,
            TokenRows(self.token_slots, turn.positions),
            cache=CachePlaces(kv, places=self.plan.places) if writes else None,
            norms=turn.norms,
            q_out=q,
            pdl=turn.pdl,
        )
        return decode_attention(q.view(-1, shape.num_heads, shape.head_dim), kv, self.plan)


def tables(d: int, device: torch.device) -> RopeTables:
    inverse = 500_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.arange(MAX_POSITION)[:, None] * inverse  # [P, d / 2]
    cos, sin = angles.cos().float(), angles.sin().float()
    return RopeTables(torch.cat((cos, cos), 1).to(device), torch.cat((-sin, sin), 1).to(device))


def make_step(shape: AttentionShape, rows: Rows, view: View, norms: bool, pdl: bool) -> Step:
    device, num_rows = rows.slots.device, rows.slots.shape[0]
    plan = plan_decode(DecodeWorkspace(shape, device, 2), rows.slots, rows.base_lens, rows.page_table, view)
    assert can_turn(plan)
    num_tokens, d = num_rows * view.query_len, shape.head_dim
    num_heads = shape.num_heads + (2 * shape.num_kv_heads if view.writes else 0)
    qkv = torch.randn(num_tokens, num_heads * d, device=device).to(torch.bfloat16)
    positions = torch.randint(0, MAX_POSITION, (num_tokens,), device=device)
    weights = torch.rand(2, d, device=device).to(torch.bfloat16) + 0.5
    turn = Turn(
        qkv, tables(d, device), positions, HeadNorms(weights[0], weights[1], 1e-6) if norms else None, pdl
    )
    return Step(plan, turn, rows.slots.repeat_interleave(view.query_len))


def check_one(shape: AttentionShape, view: View, norms: bool, pdl: bool, device: torch.device) -> None:
    lens = [77, 1152, 3000, 1022, 515, 1, 20000]
    # make_rows' places are those of pages here; its tables are wide enough for any page size.
    rows = make_rows([-(-(n + view.query_len) // shape.page_size) for n in lens], 0, device)
    rows = Rows(rows.slots, torch.tensor(lens, device=device), rows.page_table, rows.num_places)
    rows.slots[3] = 0  # padding
    step = make_step(shape, rows, view, norms, pdl)
    size = (rows.num_places * shape.page_size, shape.num_kv_heads, 2, shape.head_dim)
    caches = [torch.randn(size, device=device).to(torch.bfloat16)]
    caches.append(caches[0].clone())
    runs = [(step.fused(caches[0]), step.two_launches(caches[1])) for _ in range(20)]
    got, expected = runs[0]
    again = all(torch.equal(got, other) for other, _ in runs)
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    unequal = int((caches[0] != caches[1]).sum())
    what = "tree" if view.mask is not None else "causal" if view.writes else "none"
    print(
        f"check {shape} Q={view.query_len} {what} norms={norms}: output {error:.1e}"
        f" ({'' if torch.equal(got, expected) else 'not '}the same bits), cache differs in {unequal}"
        f" elements, repeated runs equal: {again}",
        flush=True,
    )
    assert again and error < 5e-3
    # A norm's sum is added up in another order: now and then a rounding falls the other way.
    written = len(lens) * view.query_len * size[1] * 2 * size[3]
    assert unequal <= (0.02 * written if norms else 0)
    assert torch.allclose(caches[0].float(), caches[1].float(), rtol=0, atol=2**-4)
    assert not got.view(len(lens), -1)[3].any()


def check(device: torch.device, pdl: bool) -> None:
    for shape, norms, query_len in itertools.product(CHECKED, (False, True), (1, 4, 8)):
        mask = torch.rand(7, query_len, query_len, device=device) < 0.5
        mask |= torch.eye(query_len, dtype=torch.bool, device=device)
        for view in (
            View(query_len, query_len, causal=True),
            View(query_len, query_len, mask=mask),
            View(query_len),
        ):
            check_one(shape, view, norms, pdl, device)


def time_layers(lens: list[int], query_len: int, fused: bool, pdl: bool, device: torch.device) -> float:
    """Microseconds a layer: the product, and all from there to attention's output."""
    rows = make_rows([n + query_len for n in lens], 0, device)
    rows = Rows(rows.slots, rows.base_lens - query_len, rows.page_table, rows.num_places)
    step = make_step(SHAPE, rows, View(query_len, query_len, causal=True), False, pdl)
    num_pools = min(LAYERS, max(2, int(20e9) // (rows.num_places * 4096)))
    pools = torch.randn(num_pools, rows.num_places, 8, 2, 128, device=device, dtype=torch.bfloat16)
    weights = torch.randn(LAYERS, 6144, 4096, device=device, dtype=torch.bfloat16)
    hidden = torch.randn(step.turn.qkv.shape[0], 4096, device=device).to(torch.bfloat16)

    def run() -> None:
        for layer in range(LAYERS):
            torch.mm(hidden, weights[layer].T, out=step.turn.qkv)
            (step.fused if fused else step.two_launches)(pools[layer % num_pools])

    return graph_micros(run, REPEATS, RUNS) / LAYERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pdl", action="store_true", help="overlap with the launch ahead")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    check(device, args.pdl)
    for (name, lens), query_len in itertools.product(BATCHES.items(), (1, 4)):
        two, one = (time_layers(lens, query_len, fused, args.pdl, device) for fused in (False, True))
        line = {"shape": name, "queries": query_len, "two": round(two, 2), "fused": round(one, 2)}
        print(json.dumps({**line, "saved_us": round(two - one, 2)}), flush=True)


if __name__ == "__main__":
    main()
