"""Time the variants of every small product of the steps that are to be captured, and keep the fastest.

What is fastest depends on the shape, the rows and the GPU, and on what runs before and after: no rule fits
all (docs/perf_log.md). So every variant is timed alone first, as a step runs it (with its norm, activation
and residual, in a CUDA graph, over the weights of several layers in turn, so that they come from memory).
Then the best few of each product are timed inside the step: a kernel that starts early hides behind some
neighbours and not behind others.
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

RunStep = Callable[[], object]
"""Launches one step, eagerly."""

MAX_COPIES = 32  # products in one graph
REPLAYS = 8
RUNS = 2
CLOSE = 1.3  # variants that take up to so many times the best one's time are tried in the step
MAX_TRIED = 4
GAIN = 0.998  # of the step's time: less is noise


@dataclass(frozen=True, slots=True)
class TuneReport:
    num_problems: int
    num_variants: int  # timed alone
    num_steps: int  # timed steps
    seconds: float


@torch.inference_mode()
def tune_linears(choices: KernelChoices, steps: Sequence[RunStep]) -> TuneReport:
    """Fill ``choices`` for the products of ``steps``; those the table holds already are left alone.

    The first steps' choices come first: a later one leaves them as they are.
    """
    began = time.perf_counter()
    known = set(choices.table.chosen)
    by_step = [_uses_of(choices, step, known) for step in steps]
    uses = {problem: asked for found in reversed(by_step) for problem, asked in found.items()}
    num_variants = _compile(choices, uses)
    for problem, asked in uses.items():
        _time_alone(choices, problem, asked)
    settled: set[Problem] = set()
    num_steps = 0
    for step, found in zip(steps, by_step, strict=True):
        for problem in sorted(found.keys() - settled, key=lambda p: -p.n * p.k * len(found[p])):
            num_steps += _settle(choices, problem, step)
        settled |= found.keys()
    return TuneReport(len(uses), num_variants, num_steps, time.perf_counter() - began)


def _uses_of(choices: KernelChoices, step: RunStep, known: set[str]) -> dict[Problem, list[Use]]:
    with choices.recording() as found:
        step()
    return {problem: asked for problem, asked in found.items() if problem.key not in known}


def _variants(problem: Problem, asked: Sequence[Use]) -> list[Variant]:
    info = device_info(asked[0].x.device)
    return candidates(problem, info.arch, info.num_sms)


def _compile(choices: KernelChoices, uses: Mapping[Problem, Sequence[Use]]) -> int:
    """All at once: one after the other would take a second each."""
    count = 0
    with compile_ahead(os.cpu_count() or 1):
        for problem, asked in uses.items():
            for variant in _variants(problem, asked):
                carry_out(asked[0], variant, choices)
                count += 1
    return count


def _time_alone(choices: KernelChoices, problem: Problem, asked: Sequence[Use]) -> None:
    chosen = asked[:MAX_COPIES]

    def micros(variant: Variant) -> float:
        def run() -> None:
            for use in chosen:
                carry_out(use, variant, choices)

        return _graph_micros(run) / len(chosen)

    choices.table.measure(problem, _variants(problem, asked), micros)


def _settle(choices: KernelChoices, problem: Problem, step: RunStep) -> int:
    """Try the best few variants of one product in the step; returns how many steps were timed."""
    table, key = choices.table, problem.key
    alone = sorted(table.times_us[key].items(), key=lambda item: item[1])
    close = [name for name, micros in alone[:MAX_TRIED] if micros <= CLOSE * alone[0][1]]
    best, least = close[0], float("inf")
    if len(close) == 1:
        return 0
    for name in close:
        table.chosen[key] = name
        micros = _graph_micros(step)
        if micros < least * GAIN:
            best, least = name, micros
    table.chosen[key] = best
    return len(close)


def _graph_micros(run: RunStep) -> float:
    """Microseconds of one replay; infinite where a kernel does not fit on this device."""
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
    return best * 1e3 / REPLAYS
