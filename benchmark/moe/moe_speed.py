"""A layer's experts on one GPU: right first, then how fast, beside what reading their bytes would take.

    python benchmark/moe/moe_speed.py                       # int4 of Kimi-K2.5, as one of 8 ranks has it
    python benchmark/moe/moe_speed.py --model glm5 --format nvfp4 --tokens 1 4 16
    python benchmark/moe/moe_speed.py --model gpt-oss-120b --format mxfp4 --ranks 1
    python benchmark/moe/moe_speed.py --tokens 512 8192     # of a prefill; there computing is the limit
    python benchmark/moe/moe_speed.py --tiny                # a small layer, on any machine

Random weights and random routing, another one in each of the calls of a CUDA graph, so that the experts hit
are not in the cache. Times are microseconds a layer (routing, both products, the sum). Bytes are those of the
experts that are hit, once each. ``moe_sweep.py`` times other launch constants.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.moe.config import ExpertsConfig, experts_config, pairs_config
from sgl_kernel.moe.ops import expert_counters, fused_experts
from sgl_kernel.moe.pairs import pays
from sgl_kernel.moe.reference import fused_experts_ref
from sgl_kernel.moe.weights import GROUP, ExpertMatrix, Format
from sgl_kernel.timing import graph_micros

CALLS, REPLAYS, RUNS = 16, 5, 5
TOLERANCE: Final = 2e-2  # relative; weights and what lies between the products are bfloat16


@dataclass(frozen=True, slots=True)
class Model:
    num_experts: int
    hidden: int
    inter: int  # of all ranks
    top_k: int
    is_gpt_oss: bool = False  # biases, and its activation


MODELS = {
    "kimi": Model(384, 7168, 2048, 8),
    "glm5": Model(256, 6144, 2048, 8),
    "qwen3-30b": Model(128, 2048, 768, 8),
    "gpt-oss-20b": Model(32, 2880, 2880, 4, True),
    "gpt-oss-120b": Model(128, 2880, 2880, 4, True),
}
TINY = Model(8, 128, 64, 2)


@dataclass(frozen=True, slots=True)
class Layer:
    gate_up: ExpertMatrix
    down: ExpertMatrix
    clamped: bool = False

    @property
    def bytes_per_expert(self) -> int:
        return self.gate_up.bytes_per_expert + self.down.bytes_per_expert


def make_matrix(form: Format, size: tuple[int, int, int], parts: int, device: torch.device) -> ExpertMatrix:
    """Values of about the size that keeps a product's inputs and outputs alike."""
    num_experts, rows, columns = size
    spread = columns**-0.5
    if form is Format.PLAIN:
        data = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, spread)
        return ExpertMatrix(form, data)
    if form is Format.FP8:
        data = torch.empty(size, dtype=torch.bfloat16, device=device).normal_().to(torch.float8_e4m3fn)
        blocks = (num_experts, -(-rows // 128), -(-columns // 128))
        scale = torch.empty(blocks, device=device).uniform_(0.5 * spread, 1.5 * spread)
        return ExpertMatrix(form, data, scale, block=(128, 128))
    words = torch.empty(num_experts, rows, columns // 8, dtype=torch.int32, device=device)
    words.random_(-(2**31), 2**31 - 1)
    groups = (num_experts, rows, columns // GROUP[form])
    if form is Format.MXFP4:
        middle = round(127 + math.log2(spread / 2.9))  # codes spread by 2.9
        exponents = torch.empty(groups, dtype=torch.uint8, device=device)
        return ExpertMatrix(form, words, exponents.random_(middle - 1, middle + 2))
    scale = torch.empty(groups, device=device).uniform_(0.5, 1.5)
    if form is Format.INT4:
        return ExpertMatrix(form, words, (scale * (spread / 4.6)).bfloat16())  # codes spread by 4.6
    whole = torch.full((num_experts, parts), spread / 2.8, device=device)
    return ExpertMatrix(form, words, scale.to(torch.float8_e4m3fn), whole)


def make_layer(form: Format, model: Model, ranks: int, device: torch.device) -> Layer:
    inter = model.inter // ranks
    up_size = (model.num_experts, 2 * inter, model.hidden)
    gate_up = make_matrix(form, up_size, 2, device)
    down = make_matrix(form, (model.num_experts, model.hidden, inter), 1, device)
    if model.is_gpt_oss:
        gate_up, down = with_bias(gate_up), with_bias(down)
    return Layer(gate_up, down, model.is_gpt_oss)


def with_bias(matrix: ExpertMatrix) -> ExpertMatrix:
    size = matrix.data.shape[:2]
    return replace(matrix, bias=torch.randn(size, device=matrix.data.device).mul_(0.3).to(torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Call:
    x: torch.Tensor  # [T, H]
    weights: torch.Tensor  # [T, k] float32
    experts: torch.Tensor  # [T, k] int64

    @property
    def hit(self) -> int:
        return len(self.experts.unique())


def make_calls(model: Model, tokens: int, count: int, device: torch.device) -> list[Call]:
    calls = []
    for _ in range(count):
        scores = torch.rand(tokens, model.num_experts, device=device)
        weights, experts = scores.topk(model.top_k)
        x = torch.randn(tokens, model.hidden, device=device).to(torch.bfloat16)
        calls.append(Call(x, weights / weights.sum(1, keepdim=True), experts))
    return calls


def check(
    layer: Layer, calls: Sequence[Call], config: ExpertsConfig | None, by_pair: bool | None = None
) -> float:
    """The largest relative error of some calls against the reference; repeated runs must be equal."""
    counters = expert_counters(calls[0].x.device)
    worst = 0.0
    for call in calls:
        args = (call.x, call.weights, call.experts, layer.gate_up, layer.down)
        first, second = (
            fused_experts(*args, config=config, counters=counters, by_pair=by_pair, clamped=layer.clamped)
            for _ in range(2)
        )
        expected = fused_experts_ref(*args, None, layer.clamped).float()
        worst = max(worst, float((first.float() - expected).norm() / expected.norm()))
        assert torch.equal(first, second), "two runs differ"
    assert worst < TOLERANCE, f"relative error {worst:.1e}"
    return worst


def micros(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return graph_micros(run, REPLAYS, RUNS)
    began = time.perf_counter()
    run()
    return (time.perf_counter() - began) * 1e6


def time_calls(
    layer: Layer,
    calls: Sequence[Call],
    config: ExpertsConfig | None,
    pdl: bool,
    by_pair: bool | None = None,
) -> float:
    """Microseconds a call."""
    device = calls[0].x.device
    counters = expert_counters(device)

    def run() -> None:
        for call in calls:
            fused_experts(
                call.x, call.weights, call.experts, layer.gate_up, layer.down,
                config=config, counters=counters, pdl=pdl, by_pair=by_pair, clamped=layer.clamped,
            )  # fmt: skip

    return micros(run, device) / len(calls)


def measure(
    layer: Layer, calls: Sequence[Call], by_pair: bool, args: argparse.Namespace
) -> dict[str, object]:
    make = pairs_config if by_pair else experts_config
    (tokens, top_k), info = calls[0].experts.shape, device_info(calls[0].x.device)
    config = make(info, tokens, top_k, layer.gate_up, layer.down)
    read = layer.bytes_per_expert * sum(call.hit for call in calls) / len(calls)
    error = check(layer, calls[:2], config, by_pair)
    us = time_calls(layer, calls, config, args.pdl, by_pair)
    return {
        "tokens": tokens,
        "by_pair": by_pair,
        "hit": round(sum(call.hit for call in calls) / len(calls), 1),
        "us": round(us, 2),
        "limit_us": round(read / args.bandwidth / 1e6, 2),
        "TB/s": round(read / us / 1e6, 3),
        "share": round(read / us / 1e6 / args.bandwidth, 3),
        "error": f"{error:.1e}",
        "config": asdict(config),
    }


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="kimi")
    parser.add_argument("--format", choices=[form.value for form in Format], default="int4")
    parser.add_argument("--ranks", type=int, default=8, help="of tensor parallelism (default: %(default)s)")
    parser.add_argument("--tokens", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32])
    parser.add_argument(
        "--programs",
        choices=("usual", "both"),
        default="usual",
        help="both: a program for each pair of token and expert, and for each expert",
    )
    parser.add_argument("--pdl", action="store_true", help="programmatic dependent launch")
    parser.add_argument("--bandwidth", type=float, default=4.3, help="TB/s that count as 1 (copying's)")
    parser.add_argument("--tiny", action="store_true", help="a small layer; without a GPU the reference runs")
    parser.add_argument("--out", help="all records, JSON lines")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not args.tiny:
        raise SystemExit("no CUDA device is here: --tiny runs a small layer on the CPU")
    torch.manual_seed(0)
    model, ranks = MODELS[args.model], args.ranks
    if args.tiny:
        model, ranks = replace(TINY, is_gpt_oss=model.is_gpt_oss), 1
    layer = make_layer(Format(args.format), model, ranks, device)
    lines = []
    for tokens in args.tokens:
        calls = make_calls(model, tokens, 2 if args.tiny else CALLS, device)
        usual = pays(tokens, model.num_experts, model.top_k)
        for by_pair in {"usual": (usual,), "both": (False, True)}[args.programs]:
            record = {"model": args.model, "format": args.format, **measure(layer, calls, by_pair, args)}
            print(json.dumps(record), flush=True)
            lines.append(record)
    if args.out:
        with open(args.out, "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
