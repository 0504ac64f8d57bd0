"""`auto` against plain, every fixed number of drafts, a fixed threshold, and the best of them in hindsight.

    python benchmark/h200/auto_study.py --out auto.jsonl           # Llama-8B's shape, simulated acceptance
    python benchmark/h200/auto_study.py --real --out auto.jsonl    # the embedded model, its own drafter
    python benchmark/h200/auto_study.py --table auto.jsonl         # the tables again

The scheduler runs in this process over the executor; there is no HTTP. With the 8B shape prompts are not
computed (only their last token is): their pages count as filled, so a batch of any context is there at once.
Drafts are accepted as `--acc-method` says. Parts: points (acceptance x context x streams), edge (rows hover
about the threshold while short requests are prefilled), burst (see burst.py), start (of a server with 128
slots, all kernels timed anew).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang.srt.utils.openmp import spin_briefly

spin_briefly()  # before the imports that bring torch

# ruff: noqa: E402
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmark.h200.auto_points import Point, PointRunner, Prompts, Sizes, made_up_prompts, real_prompts
from benchmark.h200.auto_tables import crossover, edge_tables, start_lines, tables
from benchmark.h200.burst import Burst, burst_tables
from benchmark.h200.executors import Records, Wanted, add_common_flags, device_name, started
from benchmark.h200.in_process import InProcess
from benchmark.h200.models import add_model_flags, context_of, folders_of, heldout_ids
from benchmark.h200.open_loop import Edge, EdgeSizes
from benchmark.h200.shapes import Folders, write_shapes
from benchmark.traces import TraceOptions
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.speculative.simulate import SimulatedAcceptance

PARTS = ("points", "edge", "burst", "start")
ACCEPTANCES = (1.3, 1.5, 2.0, 2.5)
ROOM = 4096  # places of a context beside the prompt


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a study is."""

    points: Sizes
    edge_s: float
    edge_rounds: int
    edge_lens: tuple[int, int]  # output and prompt tokens of the short requests
    burst: TraceOptions


_STREAMS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
MADE_UP = Scale(
    points=Sizes(_STREAMS, (1024, 16384), 3, 0.1, 6, 25, 50, 1.2, 9, 1.2),
    edge_s=3.0,
    edge_rounds=2,
    edge_lens=(32, 128),
    burst=TraceOptions(
        duration_s=16.0, rate=2.0, peak=249, ramp_s=0.6, period_s=5.3, output_len=96, prompt_len=256
    ),
)
REAL = replace(
    MADE_UP,
    points=Sizes(_STREAMS, (0,), 3, 0.1, 10, 80, 50, 1.2, 2, 0.3),
    burst=TraceOptions(duration_s=8.0, rate=3.0, peak=249, ramp_s=0.2, output_len=256, prompt_len=1),
)
CPU = Scale(
    points=Sizes((1, 2, 4, 8, 16, 32, 64, 96), (0,), 2, 3.0, 4, 24, 24, 8.0, 0, 0.0),
    edge_s=40.0,
    edge_rounds=2,
    edge_lens=(16, 1),
    burst=TraceOptions(duration_s=40.0, rate=0.12, peak=95, ramp_s=2.0, output_len=32, prompt_len=1),
)
TINY = Scale(
    points=Sizes((1, 3), (16, 40), 2, 0.0, 2, 4, 5, 5.0, 1, 0.05),
    edge_s=0.3,
    edge_rounds=1,
    edge_lens=(4, 4),
    burst=TraceOptions(duration_s=0.6, rate=4.0, peak=4, ramp_s=0.1, output_len=12, prompt_len=8),
)


class Study:
    """One executor; a scheduler of its own for each part."""

    def __init__(
        self, args: argparse.Namespace, scale: Scale, executor: InProcessExecutor, out: Records
    ) -> None:
        self._args, self._scale, self._executor, self._out = args, scale, executor, out
        self._earlier = read_lines(args.points) if args.points is not None else []
        simulated = executor.worker.simulated
        assert simulated is None or isinstance(simulated, SimulatedAcceptance)
        self._simulated = simulated
        self._threshold = min(args.threshold, executor.info.max_spec_rows)
        self._pool = [] if simulated else [list(p.ids) for p in heldout_ids(args, args.model_path, 512)]
        if simulated:
            _fill(executor)

    def run(self, part: str) -> None:
        {"points": self._points, "edge": self._edge, "burst": self._burst}[part]()

    def _engine(self) -> InProcess:
        cache = None if self._simulated else RadixCache(self._executor.info.page_size)
        return InProcess(self._executor, cache=cache)

    def _prompts(self) -> Prompts:
        vocab = self._executor.info.vocab_size
        return made_up_prompts(vocab) if self._simulated else real_prompts(self._pool)

    def _points(self) -> None:
        sizes, threshold = self._scale.points, self._threshold
        runner = PointRunner(self._engine(), sizes, threshold, self._prompts(), self._simulated, self._out)
        acceptances = self._args.acceptances if self._simulated else [None]
        ends = [Point(acceptances[0], sizes.contexts[0], n) for n in (sizes.streams[0], sizes.streams[-1])]
        runner.warm_up([point for point in ends if runner.fits(point)])
        for context in sizes.contexts:
            for streams in sizes.streams:
                for acceptance in acceptances:
                    runner.run(Point(acceptance, context, streams))

    def _edge(self) -> None:
        """Where speculation stops to pay, as the points tell it; else at the threshold given."""
        acceptance = self._set_length(self._args.edge_acceptance)
        context = self._scale.points.contexts[0]
        found = crossover(self._earlier + self._out.lines, acceptance, context)
        most = min(self._executor.info.num_slots - 8, self._executor.info.max_spec_rows)
        threshold = max(2, min(found or self._threshold, most))
        output_len, prompt_len = self._scale.edge_lens
        sizes = EdgeSizes(
            threshold, context, self._scale.edge_s, self._scale.edge_rounds, output_len, prompt_len
        )
        staying = self._prompts()(Point(acceptance, context, threshold - 1))
        edge = Edge(self._engine(), sizes, staying, self._prompt_of, self._out)
        labels = {"acceptance": acceptance, "context": context, "threshold": threshold}
        edge.run(skip_prefill=self._simulated is not None, labels=labels)

    def _burst(self) -> None:
        acceptance = self._set_length(self._args.burst_acceptance)
        burst = Burst(self._executor, self._scale.burst, self._threshold, self._prompt_of, self._out)
        burst.run({"acceptance": acceptance}, cached=self._simulated is None)

    def _set_length(self, length: float) -> float | None:
        if self._simulated is None:
            return None
        self._simulated.set_length(length)
        self._out.add("survival", acceptance=length, by_depth=list(self._simulated.survival))
        return length

    def _prompt_of(self, arrival: Any) -> Sequence[int]:
        if not self._simulated:
            return self._pool[arrival.index % len(self._pool)]
        vocab = self._executor.info.vocab_size
        return [(arrival.index * 7919 + place * 31) % vocab for place in range(arrival.prompt_len)]


def _fill(executor: InProcessExecutor) -> None:
    """Small numbers into the KV pools: what lies in fresh memory may be no number at all."""
    for pool in executor.worker.pools:
        for tensor in pool.tensors:
            for layer in tensor:
                layer.uniform_(-0.1, 0.1)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def wanted_of(args: argparse.Namespace, scale: Scale, folders: Folders, choices: Path) -> Wanted:
    sizes, real = scale.points, args.real
    rows = max(*sizes.streams, scale.burst.peak + 7)
    context = context_of(folders.target)
    longest = context if real else min(context, max(sizes.contexts) + ROOM)
    small = args.device == "cpu" or real
    extra = ["--speculative-disable-bs-threshold", "auto"]
    if args.mem_fraction_static is not None:
        extra += ["--mem-fraction-static", str(args.mem_fraction_static)]
    return Wanted(
        folders,
        (args.num_steps, 1, args.num_steps + 1),
        args.device,
        rows,
        total_tokens=rows * min(longest, 1024 if args.device == "cuda" else 512) if small else None,
        context_len=longest,
        spec_rows=rows,
        dtype=args.dtype or ("bfloat16" if args.device == "cuda" else "float32"),
        dummy=not real,
        choices=choices,
        extra=tuple(extra),
    )


@contextmanager
def _folders(args: argparse.Namespace) -> Iterator[tuple[Folders, Path]]:
    with tempfile.TemporaryDirectory(prefix="shapes_") as root:
        if not args.real:
            yield write_shapes(Path(root), args.tiny), Path(root) / "choices.json"
            return
        folders = folders_of(args)
        args.model_path = folders.target
        yield folders, Path(root) / "choices.json"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    add_model_flags(parser)
    parser.add_argument("--table", type=Path, help="make the tables from this file and run nothing")
    parser.add_argument("--points", type=Path, help="records of an earlier run, for the edge's threshold")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS[:3])
    parser.add_argument(
        "--real", action="store_true", help="a model with weights and its drafter (implied by --model-path)"
    )
    parser.add_argument("--threshold", type=int, default=64, help="the fixed one")
    parser.add_argument("--num-steps", type=int, default=3, help="most drafts of a step")
    parser.add_argument("--acceptances", type=float, nargs="+", default=ACCEPTANCES)
    parser.add_argument("--edge-acceptance", type=float, default=1.5)
    parser.add_argument("--burst-acceptance", type=float, default=2.5)
    parser.add_argument("--acc-method", default="geometric", help="match-expected, multinomial or geometric")
    parser.add_argument("--streams", type=int, nargs="+")
    parser.add_argument("--contexts", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, help="segments of every mode at a point")
    parser.add_argument("--segment-s", type=float, help="seconds of a segment")
    parser.add_argument("--dtype", help="default: bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--mem-fraction-static", type=float)
    args = parser.parse_args(argv)
    # A CPU is for models that it can run: without weights only the tiny one.
    args.real = args.real or args.model_path is not None or (args.device == "cpu" and not args.tiny)
    return args


def _scale(args: argparse.Namespace) -> Scale:
    scale = REAL if args.real else MADE_UP
    if args.device == "cpu":
        scale = CPU
    if args.tiny:
        scale = replace(TINY, points=replace(TINY.points, contexts=(0,))) if args.real else TINY
    changed: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in ("streams", "contexts", "rounds", "segment_s")
        if (value := getattr(args, name)) is not None
    }
    return replace(scale, points=replace(scale.points, **changed))


def main(argv: Sequence[str] | None = None) -> int:
    args = parse(argv)
    if args.table is not None:
        print("\n".join(all_tables(read_lines(args.table))))
        return 0
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = "-1" if args.real else str(args.acceptances[0])
    if not args.real:
        os.environ["SGLANG_SIMULATE_ACC_METHOD"] = args.acc_method
    scale, out = _scale(args), Records(args.out, device_name(args.device))
    with _folders(args) as (folders, choices):
        wanted = wanted_of(args, scale, folders, choices)
        parts = [part for part in args.parts if part != "start"]
        if parts:
            with started(wanted, out, "study") as executor:
                study = Study(args, scale, executor, out)
                for part in parts:
                    study.run(part)
        if "start" in args.parts:  # of a server with 128 slots, all kernels timed anew
            alone = replace(wanted, rows=min(wanted.rows, 128), spec_rows=min(wanted.rows, 128), choices=None)
            with started(alone, out, "startup"):
                pass
    print("\n".join(all_tables(out.lines)))
    return 0


def read_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def all_tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [*tables(lines), *start_lines(lines), "", *edge_tables(lines), "", *burst_tables(lines)]


if __name__ == "__main__":
    sys.exit(main())
