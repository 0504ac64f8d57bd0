"""Time the variants of every small product of the steps that are to be captured, and keep the fastest.

What is fastest depends on the shape, the rows and the GPU; no rule fits all (docs/perf_log.md). A product
is timed as a step runs it: with its norm, activation and residual, in a CUDA graph, over the weights of
all layers in turn, so that they come from memory and not from the cache.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.launch import compile_ahead
from sgl_kernel.linear.variants import Problem, Variant, candidates
from sglang.srt.layers.kernel_linear import KernelChoices, Use, carry_out

MAX_COPIES = 32  # products in one graph
REPLAYS = 3
RUNS = 2


@dataclass(frozen=True, slots=True)
class TuneReport:
    num_problems: int
    num_variants: int  # timed
    seconds: float


@torch.inference_mode()
def tune_linears(choices: KernelChoices, run_steps: Callable[[], None]) -> TuneReport:
    """Fill ``choices`` for the products of ``run_steps``; those the table holds already are left alone.

    ``run_steps`` runs, eagerly, one step of every size that will be captured.
    """
    began = time.perf_counter()
    with choices.recording() as found:
        run_steps()
    uses = {p: asked for p, asked in found.items() if p.key not in choices.table.chosen}
    num_variants = _compile(choices, uses)
    for problem, asked in uses.items():
        variants = _variants(problem, asked)
        choices.table.measure(problem, variants, lambda v, asked=asked: _micros(choices, asked, v))  # type: ignore[misc]
    return TuneReport(len(uses), num_variants, time.perf_counter() - began)


def _variants(problem: Problem, asked: Sequence[Use]) -> list[Variant]:
    info = device_info(asked[0].x.device)
    return candidates(problem, info.arch, info.num_sms)


def _compile(choices: KernelChoices, uses: Mapping[Problem, Sequence[Use]]) -> int:
    """All at once: one after the other would take a second each."""
    count = 0
    with compile_ahead(os.cpu_count() or 1):
        for problem, asked in uses.items():
            for variant in _variants(problem, asked):
                carry_out(asked[0], variant, choices.pdl(problem.rows))
                count += 1
    return count


def _micros(choices: KernelChoices, asked: Sequence[Use], variant: Variant) -> float:
    """Microseconds a product; infinite for a variant that does not fit on this device."""
    chosen = asked[:MAX_COPIES]
    pdl = choices.pdl(chosen[0].x.shape[0])

    def run() -> None:
        for use in chosen:
            carry_out(use, variant, pdl)

    try:
        run()
    except Exception as error:
        if "out of resource" in str(error):  # more shared memory than the device has
            return float("inf")
        raise
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    best = float("inf")
    for _ in range(RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end))
    return best * 1e3 / REPLAYS / len(chosen)
