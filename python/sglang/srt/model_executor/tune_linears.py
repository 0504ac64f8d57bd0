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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from sgl_kernel._dispatch import device_info
from sgl_kernel.launch import compile_ahead
from sgl_kernel.linear.variants import Problem, Variant, candidates
from sgl_kernel.timing import graph_micros
from sglang.srt.distributed.tensor_parallel import TensorParallel
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
def tune_linears(
    choices: KernelChoices,
    steps: Sequence[RunStep],
    micros: Callable[[RunStep], float] | None = None,
    tp: TensorParallel | None = None,
) -> TuneReport:
    """Fill ``choices`` for the products of ``steps``; those the table holds already are left alone.

    A class of rows is timed with the most rows that it has in any step, in the first step that has so
    many. micros: microseconds of a run; None: by CUDA graphs and events. tp: the rank; None: there is one.
    """
    began = time.perf_counter()
    micros, tp = micros or _graph_micros, tp or TensorParallel()
    known = set(choices.table.chosen)
    tellers: dict[str, _Teller] = {}
    for step in steps:
        for problem, asked in _uses_of(choices, step, known).items():
            held = tellers.get(problem.key)
            if held is None or held.problem.rows < problem.rows:
                tellers[problem.key] = _Teller(problem, asked, step)
    num_variants = tp.first_alone(lambda: _compile(choices, tellers.values()))
    for teller in tellers.values():
        _time_alone(choices, teller, micros)
    num_steps = _settle_all(choices, list(tellers.values()), steps, micros, tp.most)
    return TuneReport(len(tellers), num_variants, num_steps, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class _Teller:
    """What stands for a product and class of rows."""

    problem: Problem
    asked: Sequence[Use]
    step: RunStep

    @property
    def weight(self) -> int:
        """Weights read in the step: the products that take longest are settled first."""
        return self.problem.n * self.problem.k * len(self.asked)


def _uses_of(choices: KernelChoices, step: RunStep, known: set[str]) -> dict[Problem, list[Use]]:
    with choices.recording() as found:
        step()
    return {problem: asked for problem, asked in found.items() if problem.key not in known}


def _variants(problem: Problem, asked: Sequence[Use]) -> list[Variant]:
    info = device_info(asked[0].x.device)
    return candidates(problem, info.arch, info.num_sms)


def _compile(choices: KernelChoices, tellers: Iterable[_Teller]) -> int:
    """All at once: one after the other would take a second each."""
    count = 0
    with compile_ahead(os.cpu_count() or 1):
        for teller in tellers:
            for variant in _variants(teller.problem, teller.asked):
                carry_out(teller.asked[0], variant, choices)
                count += 1
    return count


def _time_alone(choices: KernelChoices, teller: _Teller, micros: Callable[[RunStep], float]) -> None:
    chosen = teller.asked[:MAX_COPIES]

    def of_variant(variant: Variant) -> float:
        def run() -> None:
            for use in chosen:
                carry_out(use, variant, choices)

        return micros(run) / len(chosen)

    choices.table.measure(teller.problem, _variants(teller.problem, teller.asked), of_variant)


def _settle_all(
    choices: KernelChoices,
    tellers: Sequence[_Teller],
    steps: Sequence[RunStep],
    micros: Callable[[RunStep], float],
    most: Callable[[int], int],
) -> int:
    """Step by step, of each the products that take longest first; returns how many steps were timed.

    All ranks run the same steps, and each as often as the one that has most to settle: there are
    collectives in them, which need every rank. What each of them chooses is its own business.
    """
    num_steps = 0
    for step in steps:
        own = sorted((t for t in tellers if t.step is step), key=lambda t: (t.problem.rows, -t.weight))
        for place in range(most(len(own))):
            teller = own[place] if place < len(own) else None
            num_steps += _settle(choices, step, teller, micros, most)
    return num_steps


def _settle(
    choices: KernelChoices,
    step: RunStep,
    teller: _Teller | None,
    micros: Callable[[RunStep], float],
    most: Callable[[int], int],
) -> int:
    """Try the best few variants of one product in the step; returns how many steps were timed."""
    table, close, key = choices.table, [], ""
    if teller is not None:
        key = teller.problem.key
        alone = sorted(table.times_us[key].items(), key=lambda item: item[1])
        close = [name for name, time_us in alone[:MAX_TRIED] if time_us <= CLOSE * alone[0][1]]
    num_tried = most(len(close) if len(close) > 1 else 0)
    best, least = next(iter(close), ""), float("inf")
    for place in range(num_tried):
        if place < len(close):
            table.chosen[key] = close[place]
        in_step = micros(step)
        if place < len(close) and in_step < least * GAIN:
            best, least = close[place], in_step
    if close:
        table.chosen[key] = best
    return num_tried


def _graph_micros(run: RunStep) -> float:
    """Microseconds of one replay; infinite where a kernel does not fit on this device."""
    try:
        return graph_micros(run, REPLAYS, RUNS)
    except Exception as error:
        if "out of resource" in str(error):  # more shared memory than the device has
            return float("inf")
        raise
