"""Launch constants of experts' products on one GPU: each product alone, many constants, the fastest printed.

    python benchmark/moe/moe_sweep.py                              # int4 and NVFP4 of Kimi, one of 8 ranks
    python benchmark/moe/moe_sweep.py --formats int4 --ranks 1 --tokens 1 8 32
    TRITON_INTERPRET=1 python benchmark/moe/moe_sweep.py --tiny --most 2   # on any machine

Beside every product (microseconds, and its bytes over the bandwidth) stands what the table of
``sgl_kernel/moe/config.py`` takes; at the end the layer with the best of both. Weights and routing are
random, other ones in each of the calls of a graph. Constants that do not compile or fit are left out and
counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.moe.moe_speed import (
    MODELS,
    TINY,
    Call,
    Layer,
    check,
    make_calls,
    make_layer,
    micros,
    time_calls,
)
from sgl_kernel._dispatch import device_info, interpreting
from sgl_kernel.launch import Launch, compile_ahead
from sgl_kernel.moe.config import ExpertsConfig, ProductConfig, experts_config
from sgl_kernel.moe.ops import expert_counters, make_hidden, make_routed, product_launch, route_launch
from sgl_kernel.moe.weights import PACKED, Format

CALLS = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """Constants of one of the two products; the other's do not matter."""

    gated: bool
    config: ExpertsConfig

    @property
    def own(self) -> ProductConfig:
        return self.config.gate_up if self.gated else self.config.down


def variants(usual: ExpertsConfig, gated: bool, one_pass: bool) -> Iterator[Variant]:
    """``one_pass``: the down product's columns fit in one."""
    own = usual.gate_up if gated else usual.down
    yield Variant(gated, usual)
    shapes = ((16, 1), (32, 2), (64, 4))  # rows and warps
    counts = (1, 4, 16) if one_pass and not gated else (1, 3, 8)
    for (block_n, warps), stages, count in itertools.product(shapes, (3, 4), counts):
        split, tiles = (1, count) if one_pass and not gated else (count, 1)
        product = replace(
            own, block_n=block_n, num_warps=warps, num_stages=stages, split=split, row_tiles=tiles
        )
        yield Variant(gated, with_product(usual, gated, product, usual.block_m))
    for block_m, warps in ((8, own.num_warps), (16, own.num_warps), (usual.block_m, 2 * own.num_warps)):
        yield Variant(gated, with_product(usual, gated, replace(own, num_warps=warps), block_m))


def with_product(config: ExpertsConfig, gated: bool, own: ProductConfig, block_m: int) -> ExpertsConfig:
    if gated:
        return ExpertsConfig(block_m, own, config.down)
    return ExpertsConfig(block_m, config.gate_up, own)


class Products:
    """One product of a layer, ready to be launched for some calls."""

    def __init__(self, layer: Layer, calls: Sequence[Call], variant: Variant, counters: torch.Tensor) -> None:
        config, self.route = variant.config, []
        self.launches: list[Launch] = []
        for call in calls:
            routed = make_routed(call.x, call.experts, layer.gate_up, config)
            self.route.append(route_launch(call.x, call.experts, routed, layer.gate_up, config, False))
            hidden = make_hidden(routed, call.x.dtype, layer.down, config)
            if variant.gated:
                words = config.down.width if layer.down.format in PACKED else 0
                launch = product_launch(
                    routed.x, layer.gate_up, routed, hidden, config, counters, False,
                    gated=True, out_words=words,
                )  # fmt: skip
            else:
                hidden.normal_()
                out = torch.empty(call.experts.numel(), layer.down.rows, device=call.x.device)
                launch = product_launch(hidden, layer.down, routed, out, config, counters, False, gated=False)
            self.launches.append(launch)

    def run(self) -> None:
        for launch in self.launches:
            launch.run()


def time_variants(
    layer: Layer, calls: Sequence[Call], found: Sequence[Variant], deadline: float
) -> tuple[list[tuple[float, Variant]], int]:
    """(microseconds a call, variant), the fastest first, and how many did not work."""
    device, failed = calls[0].x.device, 0
    counters = expert_counters(device)
    timed: list[tuple[float, Variant]] = []
    for variant in found:
        if time.monotonic() > deadline:
            break
        try:
            products = Products(layer, calls, variant, counters)
            for launch in products.route:
                launch.run()
            timed.append((micros(products.run, device) / len(calls), variant))
        except Exception:  # it does not fit: no reason to stop
            failed += 1
    return sorted(timed, key=lambda entry: entry[0]), failed


def compile_all(layer: Layer, call: Call, found: Sequence[Variant]) -> None:
    """Many at a time; what does not compile is found out when it is timed."""
    counters = expert_counters(call.x.device)
    for chunk in range(0, len(found), 64):
        try:
            with compile_ahead(os.cpu_count() or 1):
                for variant in found[chunk : chunk + 64]:
                    Products(layer, [call], variant, counters).run()
        except Exception as error:
            print(json.dumps({"not compiled": repr(error)[:120]}), flush=True)


def sweep(
    layer: Layer, calls: Sequence[Call], args: argparse.Namespace, deadline: float
) -> dict[str, object]:
    device, tokens = calls[0].x.device, len(calls[0].x)
    usual = experts_config(device_info(device), tokens, calls[0].experts.shape[1], layer.gate_up, layer.down)
    hit = sum(call.hit for call in calls) / len(calls)
    record: dict[str, object] = {"tokens": tokens, "hit": round(hit, 1)}
    best = usual
    for name, matrix, gated in (("gate_up", layer.gate_up, True), ("down", layer.down, False)):
        one_pass = matrix.format in PACKED and 8 * usual.down.width >= matrix.columns
        found = list(dict.fromkeys(variants(usual, gated, one_pass)))[: args.most]
        if device.type == "cuda":
            compile_all(layer, calls[0], found)
        timed, failed = time_variants(layer, calls, found, deadline)
        table = next(us for us, variant in timed if variant.config == usual)
        share = matrix.bytes_per_expert * hit / 1e6 / args.bandwidth
        record[name] = {
            "table_us": round(table, 2),
            "table_share": round(share / table, 3),
            "failed": failed,
            "best": [
                {"us": round(us, 2), "share": round(share / us, 3), "block_m": v.config.block_m}
                | asdict(v.own)
                for us, v in timed[:4]
            ],
        }
        first = timed[0][1].config
        if first.block_m == best.block_m or gated:
            best = with_product(best, gated, timed[0][1].own, first.block_m)
    both = (layer.gate_up.bytes_per_expert + layer.down.bytes_per_expert) * hit / 1e6 / args.bandwidth
    for label, config in (("table", usual), ("best", best)):
        error = check(layer, calls[:1], config)
        for pdl in (False, True) if device.type == "cuda" else (False,):
            us = time_calls(layer, calls, config, pdl)
            record[f"layer_{label}{'_pdl' if pdl else ''}"] = {
                "us": round(us, 2), "share": round(both / us, 3), "error": f"{error:.1e}",
            }  # fmt: skip
    return record


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="kimi")
    parser.add_argument("--formats", nargs="*", choices=[f.value for f in Format], default=["int4", "nvfp4"])
    parser.add_argument("--ranks", type=int, default=8, help="of tensor parallelism (default: %(default)s)")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that count as 1 (copying's)")
    parser.add_argument("--seconds", type=float, default=80, help="no variant is timed after so many")
    parser.add_argument("--most", type=int, default=30, help="variants of a product")
    parser.add_argument("--tiny", action="store_true", help="a small layer")
    parser.add_argument("--out", help="all records, JSON lines")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (args.tiny and interpreting()):
        raise SystemExit("no CUDA device is here: TRITON_INTERPRET=1 and --tiny run a small layer on the CPU")
    torch.manual_seed(0)
    model, ranks = (TINY, 1) if args.tiny else (MODELS[args.model], args.ranks)
    began, lines = time.monotonic(), []
    places = list(itertools.product(args.formats, args.tokens))
    layers: dict[str, Layer] = {}
    for index, (form, tokens) in enumerate(places):
        layers = layers if form in layers else {form: make_layer(Format(form), model, ranks, device)}
        calls = make_calls(model, tokens, 2 if args.tiny else CALLS, device)
        deadline = began + args.seconds * (index + 1) / len(places)
        found = sweep(layers[form], calls, args, deadline)
        record = {"model": args.model, "format": form, "ranks": ranks} | found
        print(json.dumps(record), flush=True)
        lines.append(record)
    if args.out:
        Path(args.out).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
