"""What packing the weights with oneDNN gives a whole step of the embedded model, on this CPU.

    python benchmark/cpu_step/step_ratios.py

Times plain steps of 1 to 16 rows and speculative steps of 1 and 4 rows (3 drafts), with packed
weights and with stock ``F.linear``, taking turns step by step. Ratios of medians are what counts: the
absolute times are those of a shared machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang.bench_one_batch_cases import OneBatch
from sglang.embedded.model import embedded_drafter_path, embedded_model_path
from sglang.srt.configs.executor_args import ExecutorArgs
from sglang.srt.layers import linear
from sglang.srt.managers.executor_build import build_executor
from sglang.srt.model_executor.executor import Executor

INPUT_LEN = 128
WARM_UPS = 2
NO_LIMIT = 10**9
CASES = ((1, 0), (2, 0), (4, 0), (8, 0), (16, 0), (1, 3), (4, 3))  # rows, drafts

Times = dict[tuple[str, int, int], list[float]]  # build, rows, drafts -> seconds of each step


@contextmanager
def stock_linears() -> Iterator[None]:
    """Models built inside keep their weights as they are."""
    can_pack = linear.can_pack
    linear.can_pack = lambda weight: False
    try:
        yield
    finally:
        linear.can_pack = can_pack


def build(max_rows: int, places: int) -> Executor:
    return build_executor(
        ExecutorArgs(
            embedded_model_path(),
            embedded_drafter_path(),
            max_total_tokens=max_rows * places,
            max_running_requests=max_rows,
        )
    )


def measure(executors: dict[str, Executor], rounds: int, steps: int, places: int) -> Times:
    times: Times = defaultdict(list)
    rng = random.Random(0)
    for _ in range(rounds):
        for rows, drafts in CASES:
            prompts = [[rng.randrange(1000, 40_000) for _ in range(INPUT_LEN)] for _ in range(rows)]
            batches = {name: OneBatch(executor, prompts, places) for name, executor in executors.items()}
            for batch in batches.values():
                batch.prefill()
            for step in range(WARM_UPS + steps):
                for name, batch in batches.items():
                    seconds, _ = batch.decode(drafts, NO_LIMIT)
                    if step >= WARM_UPS:
                        times[name, rows, drafts].append(seconds)
    return times


def table(times: Times) -> list[str]:
    """Markdown: medians in ms, and as a multiple of the same build's plain step of one row."""
    median = {key: statistics.median(values) * 1e3 for key, values in times.items()}
    lines = [
        "| step | packed ms | x of 1 row | stock ms | x of 1 row | stock / packed |",
        "|---|---|---|---|---|---|",
    ]
    for rows, drafts in CASES:
        packed, stock = median["packed", rows, drafts], median["stock", rows, drafts]
        name = f"{rows} row{'s' if rows > 1 else ''}, " + (f"{drafts} drafts" if drafts else "plain")
        lines.append(
            f"| {name} | {packed:.1f} | {packed / median['packed', 1, 0]:.2f} "
            f"| {stock:.1f} | {stock / median['stock', 1, 0]:.2f} | {stock / packed:.2f} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=7, help="timed steps of each case in each round")
    parser.add_argument("--out", type=Path, help="write all step times as JSON")
    args = parser.parse_args()
    most_rows = max(rows for rows, _ in CASES)
    places = INPUT_LEN + 4 * (WARM_UPS + args.steps) + 16
    executors = {"packed": build(most_rows, places)}
    with stock_linears():
        executors["stock"] = build(most_rows, places)
    times = measure(executors, args.rounds, args.steps, places)
    print("\n".join(table(times)))
    if args.out is not None:
        args.out.write_text(json.dumps({" ".join(map(str, key)): value for key, value in times.items()}))
    for executor in executors.values():
        executor.shutdown()


if __name__ == "__main__":
    main()
