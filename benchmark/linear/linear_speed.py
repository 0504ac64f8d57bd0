"""Products of a few rows on one GPU, by every variant: right first, then how fast.

    python benchmark/linear/linear_speed.py --rows 1 2 4 8 16 32

The products of a Llama-3.1-8B layer and its lm_head, bf16, each fused with what the model does beside it.
One CUDA graph goes over copies of the weights that together exceed the cache; times are microseconds a
product. TB/s counts the weights once.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import time
from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.launch import compile_ahead
from sgl_kernel.linear.ops import (
    Fusion,
    InputNorm,
    problem_of,
    small_linear,
    small_linear_ref,
    split_counters,
)
from sgl_kernel.linear.variants import TORCH, Variant, candidates
from sgl_kernel.timing import graph_micros

COPIES_BYTES = 400e6  # of weights in one graph, several times an H200's L2
RUNS, REPEATS = 5, 4


@dataclass(frozen=True, slots=True)
class Product:
    n: int
    k: int
    normed: bool = False
    gated: bool = False
    residual: bool = False
    float_output: bool = False


PRODUCTS = {
    "qkv": Product(6144, 4096, normed=True),
    "o": Product(4096, 4096, residual=True),
    "gate_up": Product(14336, 4096, normed=True, gated=True),
    "down": Product(4096, 14336, residual=True),
    "lm_head": Product(128256, 4096, normed=True, float_output=True),
    "fc": Product(4096, 12288),
    "draft_qkv": Product(6144, 8192),
    "draft_head": Product(32000, 4096, normed=True, float_output=True),
}


class Case:
    """One product over copies of its weights."""

    def __init__(self, product: Product, rows: int, device: torch.device) -> None:
        self.product, self.rows = product, rows
        height = product.n * (2 if product.gated else 1)
        copies = max(1, int(COPIES_BYTES / (height * product.k * 2)))
        self.weights = torch.randn(copies, height, product.k, device=device).mul_(0.02).to(torch.bfloat16)
        self.x = torch.randn(rows, product.k, device=device).to(torch.bfloat16)
        self.norm = InputNorm(torch.rand(product.k, device=device).add_(0.5).to(torch.bfloat16), 1e-5)
        self.stream = torch.randn(rows, product.n, device=device).to(torch.bfloat16)
        dtype = torch.float32 if product.float_output else torch.bfloat16
        self.out = torch.empty(rows, product.n, dtype=dtype, device=device)
        self.counters = split_counters(device)

    def fusion(self) -> Fusion:
        product = self.product
        return Fusion(
            norm=self.norm if product.normed else None,
            gated=product.gated,
            residual=self.stream if product.residual else None,
        )

    def run(self, variant: Variant, pdl: bool) -> None:
        for weight in self.weights:
            self._once(weight, variant, pdl)

    def _once(self, weight: torch.Tensor, variant: Variant, pdl: bool) -> torch.Tensor:
        return small_linear(
            self.x, weight, self.fusion(), out=self.out, variant=variant, counters=self.counters, pdl=pdl
        )

    def compile(self, variant: Variant, pdl: bool) -> None:
        self._once(self.weights[0], variant, pdl)

    def micros(self, variant: Variant, pdl: bool) -> float:
        return graph_micros(functools.partial(self.run, variant, pdl), REPEATS, RUNS) / len(self.weights)

    def error(self, variant: Variant, pdl: bool) -> float:
        self.out.fill_(float("nan"))
        weight = self.weights[0]
        got = self._once(weight, variant, pdl).double()
        wide = Fusion(
            norm=InputNorm(self.norm.weight.double(), 1e-5) if self.product.normed else None,
            gated=self.product.gated,
            residual=self.stream.double() if self.product.residual else None,
        )
        expected = torch.empty_like(got)
        small_linear_ref(self.x.double(), weight.double(), wide, expected)
        return float((got - expected).norm() / expected.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--products", nargs="*", choices=list(PRODUCTS), default=list(PRODUCTS))
    parser.add_argument("--pdl", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--out", help="all records, JSON lines")
    args = parser.parse_args()
    device = torch.device("cuda")
    torch.manual_seed(0)
    info = device_info(device)
    records = []
    began = time.time()
    with compile_ahead(os.cpu_count() or 1):
        for name, rows in itertools.product(args.products, args.rows):
            case = Case(PRODUCTS[name], rows, device)
            problem = problem_of(case.x, case.weights[0], case.fusion())
            for variant, pdl in itertools.product(candidates(problem, info.arch, info.num_sms), args.pdl):
                case.compile(variant, bool(pdl))
    print(f"compiled in {time.time() - began:.1f} s", flush=True)
    for name, rows in itertools.product(args.products, args.rows):
        case = Case(PRODUCTS[name], rows, device)
        problem = problem_of(case.x, case.weights[0], case.fusion())
        found = []
        for variant, pdl in itertools.product(candidates(problem, info.arch, info.num_sms), args.pdl):
            if variant == TORCH and pdl:
                continue
            try:
                error = case.error(variant, bool(pdl))
                micros = case.micros(variant, bool(pdl))
            except Exception as failure:  # a variant that does not fit is no reason to stop
                print(json.dumps({"product": name, "rows": rows, "variant": variant.name,
                                  "failed": repr(failure)[:160]}), flush=True)  # fmt: skip
                continue
            size = case.weights[0].numel() * 2
            found.append(
                {"product": name, "rows": rows, "variant": variant.name, "pdl": pdl, "us": round(micros, 2),
                 "TB/s": round(size / micros / 1e6, 2), "error": f"{error:.1e}"}
            )  # fmt: skip
        found.sort(key=lambda record: record["us"])
        records += found
        library = next((r["us"] for r in found if r["variant"] == "torch"), None)
        for record in found[:4]:
            print(json.dumps(record), f"torch {library}", flush=True)
        worst = max(float(r["error"]) for r in found)
        print(f"{name} rows {rows}: worst error {worst:.1e}", flush=True)
    if args.out:
        with open(args.out, "w") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)


if __name__ == "__main__":
    main()
