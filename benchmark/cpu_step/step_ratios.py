"""Whole steps of the embedded model on this CPU: what packed weights give, and what a drafter costs.

    python benchmark/cpu_step/step_ratios.py

Three builds, each in a process of its own: weights packed with oneDNN, stock ``F.linear``, and packed
without a drafter. They take turns step by step, and a process that waits sleeps, so all meet the same
machine; two executors in one process would have two OpenMP pools and disturb each other. Ratios of medians
are what counts: the absolute times are those of a shared machine. Two processes of one build differ by some
percent too (where their memory lies), which the intervals do not hold.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from sglang.srt.utils.openmp import spin_briefly

spin_briefly()  # before the imports that bring torch; a child imports this module anew

# ruff: noqa: E402
from sglang.bench_one_batch_cases import OneBatch
from sglang.embedded.model import embedded_drafter_path, embedded_model_path
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.layers import linear
from sglang.srt.managers.executor_build import build_executor

INPUT_LEN: Final = 128
WARM_UPS: Final = 2
NO_LIMIT: Final = 10**9
PACKED, STOCK, ALONE = "packed", "stock", "no drafter"
CASES: Final = ((1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (1, 3), (4, 3))  # rows, drafts

Times = dict[tuple[str, int, int], list[float]]  # build, rows, drafts -> seconds of each step


def serve(channel: Connection, build: str, max_rows: int, places: int) -> None:
    """A child: prompts begin a batch, a number of drafts makes a step and is answered with its seconds."""
    if build == STOCK:
        linear.can_pack = lambda weight: False
    executor = build_executor(
        ExecutorArgs(
            embedded_model_path(),
            None if build == ALONE else embedded_drafter_path(),
            max_total_tokens=max_rows * places,
            max_running_requests=max_rows,
        )
    )
    batch: OneBatch | None = None
    channel.send(True)
    while (wish := channel.recv()) is not None:
        if isinstance(wish, int):
            assert batch is not None
            channel.send(batch.decode(wish, NO_LIMIT)[0])
        else:
            batch = OneBatch(executor, wish, places)
            batch.prefill()
            channel.send(True)
    executor.shutdown()


class Build:
    """An executor in a process of its own."""

    def __init__(self, name: str, max_rows: int, places: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._channel, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, name, max_rows, places), daemon=True)
        self._process.start()
        assert self._channel.recv()

    def ask(self, wish: Any) -> Any:
        self._channel.send(wish)
        return self._channel.recv()

    def close(self) -> None:
        self._channel.send(None)
        self._process.join()


def measure(builds: dict[str, Build], rounds: int, steps: int) -> Times:
    times: Times = defaultdict(list)
    rng = random.Random(0)
    for _ in range(rounds):
        for rows, drafts in CASES:
            prompts = [[rng.randrange(1000, 40_000) for _ in range(INPUT_LEN)] for _ in range(rows)]
            taking_part = [name for name in builds if name != ALONE or drafts == 0]
            for name in taking_part:
                builds[name].ask(prompts)
            for step in range(WARM_UPS + steps):
                rng.shuffle(taking_part)
                for name in taking_part:
                    seconds = builds[name].ask(drafts)
                    if step >= WARM_UPS:
                        times[name, rows, drafts].append(seconds)
    return times


def ratio(times: Sequence[float], others: Sequence[float]) -> str:
    """Of medians, with a 95 % bootstrap interval; steps of one turn stay together."""
    rng, pairs = random.Random(0), list(zip(times, others, strict=True))

    def of(chosen: Sequence[tuple[float, float]]) -> float:
        return statistics.median(a for a, _ in chosen) / statistics.median(b for _, b in chosen)

    draws = sorted(of(rng.choices(pairs, k=len(pairs))) for _ in range(1000))
    return f"{of(pairs):.2f} [{draws[25]:.2f}, {draws[-25]:.2f}]"


def table(times: Times) -> list[str]:
    """Markdown: medians in ms, as a multiple of the same build's plain step of one row; ratios of builds."""
    median = {key: statistics.median(values) * 1e3 for key, values in times.items()}
    lines = [
        "| step | packed ms | x of 1 row | stock ms | x of 1 row | stock / packed | with / without drafter |",
        "|---|---|---|---|---|---|---|",
    ]
    for rows, drafts in CASES:
        packed, stock = median[PACKED, rows, drafts], median[STOCK, rows, drafts]
        name = f"{rows} row{'s' if rows > 1 else ''}, " + (f"{drafts} drafts" if drafts else "plain")
        of_packed = times[PACKED, rows, drafts]
        cost = "" if drafts else ratio(of_packed, times[ALONE, rows, 0])
        lines.append(
            f"| {name} | {packed:.1f} | {packed / median[PACKED, 1, 0]:.2f} "
            f"| {stock:.1f} | {stock / median[STOCK, 1, 0]:.2f} "
            f"| {ratio(times[STOCK, rows, drafts], of_packed)} | {cost} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each case in each round")
    parser.add_argument("--out", type=Path, help="write all step times as JSON")
    args = parser.parse_args()
    most_rows = max(rows for rows, _ in CASES)
    places = INPUT_LEN + 4 * (WARM_UPS + args.steps) + 16
    builds = {name: Build(name, most_rows, places) for name in (PACKED, STOCK, ALONE)}
    times = measure(builds, args.rounds, args.steps)
    print("\n".join(table(times)))
    if args.out is not None:
        args.out.write_text(json.dumps({" ".join(map(str, key)): value for key, value in times.items()}))
    for build in builds.values():
        build.close()


if __name__ == "__main__":
    main()
