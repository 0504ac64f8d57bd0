"""Draft lengths of each row's own inside one step: do they pay? Llama-3.1-8B shape, dummy weights.

    python benchmark/h200/ragged.py --out ragged.jsonl
    python benchmark/h200/ragged.py --table ragged.jsonl     # the tables again

Half of the rows accept much, half little (simulated). Every step is a replay of a CUDA graph: plain, 1, 2 and
3 drafts for all rows, and ragged ones keyed by draft forwards and by verified tokens. First every graph is
timed; the ragged step that promises the most by that is then timed again beside the common lengths, in turn,
so that who won by a lucky time does not keep it. Tokens are those expected of the acceptance asked for; what
was put out is recorded beside them.

    python benchmark/h200/ragged.py --auto --out ragged_auto.jsonl     # with --table FILE its table

runs the scheduler instead, with two of `auto` in turn: one may give rows draft lengths of their own, the
other may not (`ragged_auto.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from benchmark.h200.executors import CHAIN, Records, Wanted, add_common_flags, device_name, started
from benchmark.h200.shapes import write_shapes
from sgl_kernel.launch import compile_ahead
from sglang.srt.model_executor.graph_sizes import GraphKey, GraphSizes
from sglang.srt.model_executor.measure_costs import DeviceStopwatch, HostStopwatch, Stopwatch
from sglang.srt.model_executor.step_graphs import CudaCapture, StepGraphs
from sglang.srt.model_executor.step_plan import StepKind, StepPlan
from sglang.srt.model_executor.worker import Worker
from sglang.srt.speculative.allocation import Sharing
from sglang.srt.speculative.simulate import SimulatedAcceptance

MIXES = ((2.5, 1.5), (2.5, 1.2))  # tokens of a step with all drafts, of even slots and of odd ones
SHARES = {
    1: (1.25, 1.5, 1.75),
    2: (1.25, 1.5, 1.75, 2, 2.25, 2.5, 2.75),
    3: (1.5, 1.75, 2, 2.25, 2.5, 2.75, 3, 3.5),
}
"""Verified tokens a row, by draft forwards."""

Run = Callable[[Sequence[int], int, Sequence[int]], object]
"""A step: slots, draft forwards, how many drafts each row verifies (none: all)."""


@dataclass(frozen=True, slots=True)
class Sizes:
    points: tuple[tuple[int, int], ...]  # rows, context
    steps: int  # of a segment
    first_rounds: int
    rounds: int


FULL = Sizes(((64, 1024), (64, 4096), (128, 1024), (128, 4096), (256, 1024)), 10, 2, 3)
TINY = Sizes(((8, 16),), 2, 1, 1)


@dataclass(frozen=True, slots=True)
class Kind:
    """A step of R rows: ``tokens`` 0 for the same number of drafts in every row."""

    draft_len: int
    tokens: int = 0

    @property
    def name(self) -> str:
        common = f"k={self.draft_len}" if self.draft_len else "plain"
        return f"ragged {self.draft_len}, {self.tokens}" if self.tokens else common


def kinds(rows: int) -> list[Kind]:
    ragged = [Kind(k, int(share * rows)) for k, shares in SHARES.items() for share in shares]
    return [*map(Kind, range(CHAIN[0] + 1)), *ragged]


class Segments:
    """Runs of one kind of step, from the same state each time."""

    def __init__(self, worker: Worker, run: Run, watch: Stopwatch, steps: int) -> None:
        self._worker, self._run, self._watch, self._steps = worker, run, watch, steps

    def begin(self, rows: int, context: int) -> None:
        """Pages of their own for the rows."""
        state, config = self._worker.state, self._worker.config
        pages = -(-(context + 4 * (self._steps + 4)) // config.page_size)
        assert rows * pages <= config.num_pages, "the pool is too small"
        places = torch.arange(rows * pages, dtype=torch.int32, device=state.device) + 1
        state.page_table[1 : rows + 1, :pages] = places.view(rows, pages)

    @torch.inference_mode()
    def measure(self, rows: int, context: int, draft_len: int, drafts: Sequence[int]) -> tuple[float, float]:
        """Seconds and tokens of a step, on average."""
        slots, lens = tuple(range(1, rows + 1)), self._worker.state.seq_len[1 : rows + 1]
        lens.fill_(context)
        for _ in range(2):
            self._run(slots, draft_len, drafts)
        before = lens.sum()
        begin = self._watch.mark()
        for _ in range(self._steps):
            self._run(slots, draft_len, drafts)
        seconds = self._watch.seconds(begin, self._watch.mark())
        return seconds / self._steps, float(lens.sum() - before) / self._steps


class Study:
    def __init__(
        self,
        segments: Segments,
        simulated: SimulatedAcceptance,
        sizes: Sizes,
        mixes: Sequence[tuple[float, float]],
        out: Records,
    ) -> None:
        self._segments, self._simulated, self._sizes, self._mixes, self._out = (
            segments,
            simulated,
            sizes,
            mixes,
            out,
        )

    def run(self) -> None:
        for rows, context in self._sizes.points:
            self._segments.begin(rows, context)
            seconds = self._all_kinds(rows, context)
            for mix in self._mixes:
                self._simulated.set_length(*mix)
                best = max(
                    (kind for kind in seconds if kind.tokens),
                    key=lambda kind: self._expected(rows, kind)[0] / seconds[kind],
                )
                self._turns(rows, context, mix, [*map(Kind, range(CHAIN[0] + 1)), best])

    def _all_kinds(self, rows: int, context: int) -> dict[Kind, float]:
        self._simulated.set_length(*self._mixes[0])
        found: dict[Kind, list[float]] = {}
        for number in range(self._sizes.first_rounds):
            for kind in kinds(rows)[:: -1 if number % 2 else 1]:
                drafts = self._expected(rows, kind)[1]
                seconds = self._segments.measure(rows, context, kind.draft_len, drafts)[0]
                found.setdefault(kind, []).append(seconds)
        for kind, times in found.items():
            self._out.add(
                "step",
                rows=rows,
                context=context,
                draft_len=kind.draft_len,
                tokens=kind.tokens,
                seconds=times,
            )
        return {kind: median(times) for kind, times in found.items()}

    def _turns(self, rows: int, context: int, mix: tuple[float, float], of: Sequence[Kind]) -> None:
        for number in range(self._sizes.rounds):
            for kind in of[:: -1 if number % 2 else 1]:
                expected, drafts = self._expected(rows, kind)
                seconds, tokens = self._segments.measure(rows, context, kind.draft_len, drafts)
                self._out.add(
                    "turn", rows=rows, context=context, mix=mix, name=kind.name, draft_len=kind.draft_len,
                    verified=kind.tokens, seconds=seconds, tokens=tokens, expected=expected,
                )  # fmt: skip

    def _expected(self, rows: int, kind: Kind) -> tuple[float, tuple[int, ...]]:
        """Tokens of a step, and the drafts of each row (none where all rows have the same number)."""
        survivals = self._simulated.survivals
        sharing = Sharing(np.array([survivals[slot % len(survivals)] for slot in range(1, rows + 1)]))
        if not kind.tokens:
            return rows + sharing.extra_tokens()[kind.draft_len], ()
        num_drafts = kind.tokens - rows
        drafts = sharing.drafts(kind.draft_len, num_drafts)
        return rows + sharing.accepted(kind.draft_len, num_drafts), drafts


@torch.inference_mode()
def captured(worker: Worker, sizes: Sizes) -> Run:
    """Graphs of all kinds, beside those that the executor has made; on this thread's stream."""
    device = worker.config.device
    torch.cuda.set_stream(torch.cuda.Stream(device))
    square = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    torch.mm(square, square)  # the library makes its handle of this thread, which a capture forbids
    assert worker.decode_steps is not None
    by_rows = sorted({rows for rows, _ in sizes.points})
    ragged = [
        GraphKey(kind.draft_len, rows, kind.tokens) for rows in by_rows for kind in kinds(rows) if kind.tokens
    ]
    graph_sizes = GraphSizes(dict.fromkeys(range(CHAIN[0] + 1), by_rows), pad=False, ragged=ragged)
    graphs = StepGraphs(
        worker.decode_steps.step, CudaCapture(device), graph_sizes, worker.config.spec, device
    )
    graphs.compile_ahead(compile_ahead)
    graphs.capture_all()

    def run(slots: Sequence[int], draft_len: int, drafts: Sequence[int]) -> object:
        done = graphs.run(slots, draft_len, drafts)
        assert done is not None, f"no graph for {draft_len} drafts of {len(slots)} rows, {sum(drafts)} in all"
        return done

    return run


def planned(worker: Worker) -> Run:
    """Where nothing is captured: plans."""

    def run(slots: Sequence[int], draft_len: int, drafts: Sequence[int]) -> object:
        bounds = tuple(worker.state.seq_len[list(slots)].tolist())
        return worker.execute(StepPlan(0, StepKind.DECODE, tuple(slots), bounds, draft_len, tuple(drafts)))

    return run


@torch.inference_mode()
def fill(worker: Worker) -> None:
    """Small numbers into the KV pools: what lies in fresh memory may be no number at all."""
    for pool in worker.pools:
        for tensor in pool.tensors:
            for layer in tensor:
                layer.uniform_(-0.1, 0.1)


def tables(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield from _step_table([line for line in lines if line["kind"] == "step"])
    turns = [line for line in lines if line["kind"] == "turn"]
    yield ""
    names = (
        "rows",
        "context",
        "accept",
        "plain",
        "k=1",
        "k=2",
        "k=3",
        "ragged",
        "k, verified",
        "gain",
        "put out",
    )
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    for rows, context, mix in dict.fromkeys((x["rows"], x["context"], tuple(x["mix"])) for x in turns):
        found: dict[str, list[dict[str, Any]]] = {}
        for line in turns:
            if (line["rows"], line["context"], tuple(line["mix"])) == (rows, context, mix):
                found.setdefault(line["name"], []).append(line)
        rates = {name: median(x["expected"] / x["seconds"] for x in of) for name, of in found.items()}
        best_common = max(rate for name, rate in rates.items() if not name.startswith("ragged"))
        name = next(name for name in rates if name.startswith("ragged"))
        put_out = median(x["tokens"] / x["expected"] for x in found[name])
        cells = [f"{rates[each]:.0f}" for each in ("plain", "k=1", "k=2", "k=3", name)]
        gain = 100 * (rates[name] / best_common - 1)
        accept = " and ".join(map(str, mix))
        cells = [str(rows), str(context), accept, *cells, name[7:], f"{gain:+.1f} %", f"{put_out:.3f}"]
        yield f"| {' | '.join(cells)} |"


def _step_table(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| rows | context | draft forwards | ms by verified tokens |"
    yield "|---|---|---|---|"
    for rows, context, draft_len in dict.fromkeys((x["rows"], x["context"], x["draft_len"]) for x in lines):
        of = [x for x in lines if (x["rows"], x["context"], x["draft_len"]) == (rows, context, draft_len)]
        of.sort(key=lambda x: x["tokens"] or rows * (draft_len + 1))
        times = ", ".join(
            f"{x['tokens'] or f'all {rows * (draft_len + 1)}'}: {1e3 * median(x['seconds']):.2f}" for x in of
        )
        yield f"| {rows} | {context} | {draft_len} | {times} |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_common_flags(parser)
    parser.add_argument("--auto", action="store_true", help="see above")
    parser.add_argument("--table", type=Path, help="make the tables from this file and run nothing")
    args = parser.parse_args(argv)
    if args.auto:
        return main_auto(args)
    if args.table is not None:
        print("\n".join(tables(_read(args.table))))
        return 0
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = ",".join(map(str, MIXES[0]))
    os.environ["SGLANG_SIMULATE_ACC_METHOD"] = "geometric"
    sizes, out, began = (
        TINY if args.tiny else FULL,
        Records(args.out, device_name(args.device)),
        time.perf_counter(),
    )
    rows = tuple(sorted({rows for rows, _ in sizes.points}))
    room = 4 * (sizes.steps + 8)
    with tempfile.TemporaryDirectory(prefix="shapes_") as root:
        wanted = Wanted(
            write_shapes(Path(root), args.tiny),
            CHAIN,
            args.device,
            rows[-1],
            total_tokens=max(n * (context + room) for n, context in sizes.points),
            context_len=max(context + room for _, context in sizes.points),
            spec_rows=rows[-1],
            graph_sizes=rows,
            dtype="bfloat16" if args.device == "cuda" else "float32",
            dummy=True,
        )
        with started(wanted, out, "ragged") as executor:
            worker, simulated = executor.worker, executor.worker.simulated
            assert isinstance(simulated, SimulatedAcceptance)
            fill(worker)
            on_gpu = args.device == "cuda"
            run = captured(worker, sizes) if on_gpu else planned(worker)
            out.add("captured", seconds=time.perf_counter() - began)
            watch = DeviceStopwatch() if on_gpu else HostStopwatch()
            Study(Segments(worker, run, watch, sizes.steps), simulated, sizes, MIXES, out).run()
            out.add("done", seconds=time.perf_counter() - began)
    print("\n".join(tables(out.lines)))
    return 0


def main_auto(args: argparse.Namespace) -> int:
    from benchmark.h200 import ragged_auto

    lines = [] if args.table is None else _read(args.table)
    if args.table is None:
        out = Records(args.out, device_name(args.device))
        ragged_auto.run(args.device, args.tiny, out)
        lines = out.lines
    print("\n".join(ragged_auto.tables(lines)))
    return 0


def _read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())
