"""An indexer's choice and sparse latent attention (DSA) on one GPU: right first, then how fast.

    python benchmark/attention/dsa_speed.py --check             # against the reference, nothing else
    python benchmark/attention/dsa_speed.py                     # GLM-5: 32 heads of an indexer, 8 of a rank
    python benchmark/attention/dsa_speed.py --index-heads 64 --heads 16 --shapes 8x65536
    python benchmark/attention/dsa_speed.py --tiny              # small caches, on any machine

Keys of 128 numbers, latents of 512 and turned keys of 64, bf16, page size 1, places in random order, 2048
chosen. Times are microseconds a layer, of a CUDA graph with several layers by one plan: choosing (its first
two launches also by themselves, the third is the difference), and attention; limits are what each must read
at the bandwidth given.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import use_kernel
from sgl_kernel.attention import DecodePlan, View, plan_decode
from sgl_kernel.attention.mla.indexing.op import choose_places, count_launch, score_launch
from sgl_kernel.attention.mla.indexing.plan import IndexPlan, IndexWorkspace, plan_index
from sgl_kernel.attention.mla.indexing.reference import choose_places_ref, index_scores
from sgl_kernel.attention.mla.op import LatentWorkspace, latent_attention
from sgl_kernel.attention.mla.reference import latent_attention_ref
from sgl_kernel.timing import graph_micros

R, ROPE, DIM = 512, 64, 128
SCALE = 256**-0.5
LAYERS, REPLAYS, RUNS = 4, 5, 3
SHAPES = {f"{rows}x{length}": [length] * rows for length in (1024, 16384, 65536) for rows in (1, 8, 64)}
TINY = {"2x300": [300, 300], "3x40": [40, 40, 40]}


@dataclass(frozen=True, slots=True)
class World:
    """One step's rows, and the caches of a layer; all layers read the same."""

    lens: list[int]
    query_len: int
    slots: torch.Tensor  # [R] int64
    base_lens: torch.Tensor  # [R] int64
    page_table: torch.Tensor  # [R + 1, max_len] int32
    keys: torch.Tensor  # [layers, places, d]
    latents: torch.Tensor  # [layers, places, R + r]
    index_q: torch.Tensor  # [T, h, d]
    weights: torch.Tensor  # [T, h] float32
    q: torch.Tensor  # [T, nq, R + r]


def make_world(lens: list[int], query_len: int, args: argparse.Namespace, layers: int) -> World:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table = torch.zeros(len(lens) + 1, max(lens), dtype=torch.int32, device=device)
    order = torch.randperm(sum(lens), device=device).to(torch.int32) + 1
    begin = 0
    for row, length in enumerate(lens, start=1):
        table[row, :length] = order[begin : begin + length]
        begin += length
    tokens, places = len(lens) * query_len, sum(lens) + 1

    def draw(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_()

    return World(
        lens=lens,
        query_len=query_len,
        slots=torch.arange(1, len(lens) + 1, device=device),
        base_lens=torch.tensor(lens, device=device) - query_len,
        page_table=table,
        keys=draw(layers, places, DIM),
        latents=draw(layers, places, R + ROPE),
        index_q=draw(tokens, args.index_heads, DIM),
        weights=torch.randn(tokens, args.index_heads, device=device) * 0.02,
        q=draw(tokens, args.heads, R + ROPE).mul_(0.5),
    )


class Plans:
    """Makes the step's plans in the same workspaces, as a backend does."""

    def __init__(self, world: World, args: argparse.Namespace) -> None:
        device = world.slots.device
        self._world = world
        self._index = IndexWorkspace(args.index_heads, DIM, args.top_k, 1, device, 2, pdl=args.pdl)
        self._over = LatentWorkspace(args.heads, R, 1, device, 2, pdl=args.pdl)

    def fill(self) -> tuple[IndexPlan, DecodePlan]:
        world, queries = self._world, self._world.query_len
        view = View(queries, queries, causal=True)
        index = plan_index(self._index, world.slots, world.base_lens, world.page_table, view)
        return index, plan_decode(self._over, index.ids, index.counts, index.chosen, View(1))


def chosen(plan: IndexPlan) -> list[set[int]]:
    return [
        set(row[:count].tolist())
        for row, count in zip(plan.chosen[1:].cpu(), plan.counts.tolist(), strict=True)
    ]


def check(lens: list[int], query_len: int, args: argparse.Namespace, ties: bool) -> None:
    """Against the reference in float32: the same places, but for scores that differ by rounding alone.

    ties: products are exact and most scores are equal, so there is no rounding.
    """
    world = make_world(lens, query_len, args, 1)
    if ties:
        for tensor in (world.keys, world.index_q, world.weights):
            tensor.copy_(torch.randint(-1, 2, tensor.shape, device=tensor.device))
    plans = Plans(world, args)
    index, over = plans.fill()
    expected, _ = Plans(world, args).fill()
    keys = world.keys[0]
    choose_places(world.index_q, world.weights, keys, index)
    first = index.chosen.clone()
    choose_places_ref(world.index_q, world.weights, keys, expected)
    worst = 0.0
    for token, (got, wanted) in enumerate(zip(chosen(index), chosen(expected), strict=True)):
        assert len(got) == len(wanted) == int(index.counts[token])
        if got != wanted:
            assert not ties, f"token {token}: {len(got - wanted)} other places of equal scores"
            apart = torch.tensor(sorted(got - wanted) + sorted(wanted - got), device=keys.device)
            scores = index_scores(world.index_q[token], world.weights[token], keys[apart], torch.float32)
            worst = max(worst, float(scores.max() - scores.min()))
    choose_places(world.index_q, world.weights, keys, index)
    assert torch.equal(_of_counts(first, index), _of_counts(index.chosen, index)), "again, and not the same"
    out = latent_attention(world.q, world.latents[0], over, SCALE)
    reference = latent_attention_ref(world.q.float(), world.latents[0].float(), over, SCALE, None)
    error = float((out.float() - reference).norm() / reference.norm())
    print(
        f"check {lens} Q={query_len} ties={ties}: scores apart {worst:.1e}, attention {error:.1e}", flush=True
    )
    assert worst < 1e-4 and error < 1e-2


def _of_counts(places: torch.Tensor, plan: IndexPlan) -> torch.Tensor:
    inside = torch.arange(plan.top_k, device=places.device) < plan.counts[:, None]
    return places[1:].masked_fill(~inside, 0)


def micros(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return graph_micros(run, REPLAYS, RUNS)
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6


def measure(name: str, lens: list[int], query_len: int, args: argparse.Namespace) -> None:
    layers = 2 if args.tiny else LAYERS
    world = make_world(lens, query_len, args, layers)
    plans, device = Plans(world, args), world.slots.device
    index, over = plans.fill()
    out = world.q.new_empty(*world.q.shape[:2], R)

    def score(layer: int) -> None:
        score_launch(world.index_q, world.weights, world.keys[layer], index, 0).run()

    def count(layer: int) -> None:
        count_launch(index, 0).run()

    def choose(layer: int) -> None:
        choose_places(world.index_q, world.weights, world.keys[layer], index)

    def attend(layer: int) -> None:
        latent_attention(world.q, world.latents[layer], over, SCALE, out=out)

    def a_layer(run: Callable[[int], None]) -> float:
        def step() -> None:
            for layer in range(layers):
                run(layer)

        return round(micros(step, device) / layers, 1)

    record: dict[str, object] = {"shape": name, "queries": query_len}
    record |= {"plan_us": round(micros(plans.fill, device), 1)}
    record |= {"choose_us": (chosen_in := a_layer(choose)), "attend_us": a_layer(attend)}
    if use_kernel(world.q) and index.rows_at_once >= len(lens):
        # The last launch is what remains: it ends what the others began, so it can't run alone.
        scored_in, counted_in = a_layer(score), a_layer(count)
        sifted_in = round(chosen_in - scored_in - counted_in, 1)
        record |= {"score_us": scored_in, "count_us": counted_in, "sift_us": sifted_in}
    record |= limits(lens, query_len, args)
    print(json.dumps(record), flush=True)


def limits(lens: list[int], query_len: int, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds: keys of long rows once; latents of the places chosen, once a query."""
    keys = sum(length for length in lens if length > args.top_k) * DIM * 2
    scores = sum(length for length in lens if length > args.top_k) * query_len * 4
    latents = sum(min(length, args.top_k) for length in lens) * query_len * (R + ROPE) * 2
    of_bytes = {"score_limit_us": keys + scores, "sift_limit_us": scores, "attend_limit_us": latents}
    return {name: round(count / args.bandwidth / 1e6, 1) for name, count in of_bytes.items()}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--heads", type=int, default=8, help="of this rank (default: %(default)s)")
    parser.add_argument("--index-heads", type=int, default=32, help="of the indexer (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=None, help="default: 2048, with --tiny 64")
    parser.add_argument("--queries", nargs="*", type=int, default=[1, 4])
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--check", action="store_true", help="compare with the reference, and stop")
    parser.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that count as 1 (copying's)")
    parser.add_argument("--tiny", action="store_true", help="small caches; without a GPU the reference runs")
    args = parser.parse_args(argv)
    if args.top_k is None:
        args.top_k = 64 if args.tiny else 2048
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if not torch.cuda.is_available() and not args.tiny:
        raise SystemExit("no CUDA device is here: --tiny runs small caches on the CPU")
    torch.manual_seed(0)
    lens = [90, 40] if args.tiny else [77, 4096, 3000, 2049, 20000, 2048]
    for query_len in args.queries:
        for ties in (False, True):
            check(lens, query_len, args, ties)
    if args.check:
        return
    shapes = TINY if args.tiny else {name: SHAPES[name] for name in args.shapes}
    for name, of_rows in shapes.items():
        for query_len in args.queries:
            measure(name, of_rows, query_len, args)


if __name__ == "__main__":
    main()
