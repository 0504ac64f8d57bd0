"""How long a plan takes from the scheduler to every rank, and a result back from rank 0.

    python benchmark/plan_broadcast/plan_broadcast.py

No model is loaded: ranks decode each plan, say when they had it, and rank 0 answers with a result of as many
rows. Times are of one clock (CLOCK_MONOTONIC), which processes of one host share.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from sglang.srt.model_executor.multi_process_executor import make_folder
from sglang.srt.model_executor.rank_messages import (
    PLANS,
    RESULTS,
    decode_plan,
    decode_result,
    encode,
    status_ring,
)
from sglang.srt.model_executor.step_plan import PageWrite, PrefillChunk, StepKind, StepPlan, StepResult
from sglang.srt.utils.shared_ring import RingReader, RingWriter, create_ring

PAUSE_S = 0.002  # between two plans: a rank that has nothing to do sleeps


def decode(rows: int) -> StepPlan:
    """Every row writes to a new page."""
    slots = tuple(range(1, rows + 1))
    writes = tuple(PageWrite(slot, 1000, (5000 + slot,)) for slot in slots)
    return StepPlan(0, StepKind.DECODE, slots, (1000,) * rows, 3, page_writes=writes)


def prefill(tokens: int) -> StepPlan:
    ids = tuple(range(100_000, 100_000 + tokens))
    return StepPlan(
        0, StepKind.PREFILL, prefill=(PrefillChunk(1, 0, ids, None),), page_writes=(PageWrite(1, 0, ids),)
    )


PLANS_TIMED = {
    "decode, 1 row": decode(1),
    "decode, 64 rows": decode(64),
    "decode, 256 rows": decode(256),
    "prefill, 8192 tokens": prefill(8192),
}


@dataclass(frozen=True, slots=True)
class Round:
    encode_s: float
    last_rank_s: float  # from the launch until the last rank had decoded the plan
    result_s: float  # from the launch until rank 0's result was decoded


def be_rank(folder: Path, rank: int, size: int) -> None:
    plans = RingReader(folder, PLANS, size, rank)
    status = RingWriter(folder, status_ring(rank), 1)
    results = RingWriter(folder, RESULTS, 1) if rank == 0 else None
    status.send(b"ready")
    while message := plans.receive():
        plan = decode_plan(message)
        had = time.monotonic()
        if results is not None:
            tokens = tuple((7, 8, 9) for _ in range(max(1, len(plan.decode_slots))))
            results.send(encode(StepResult(plan.step_id, tokens, (False,) * len(tokens), 0.0)))
        status.send(json.dumps(had).encode())


class Ranks:
    def __init__(self, size: int) -> None:
        self.folder = make_folder()
        self._bells = create_ring(self.folder, PLANS, size) + create_ring(self.folder, RESULTS, 1)
        for rank in range(size):
            self._bells += create_ring(self.folder, status_ring(rank), 1)
        self._plans = RingWriter(self.folder, PLANS, size)
        self._results = RingReader(self.folder, RESULTS, 1)
        self._status = [RingReader(self.folder, status_ring(rank), 1) for rank in range(size)]
        command = [sys.executable, __file__, "--rank-of", str(size), "--folder", str(self.folder), "--rank"]
        self._children = [subprocess.Popen([*command, str(rank)]) for rank in range(size)]
        for status in self._status:
            assert status.receive(60) == b"ready", "a rank did not start"

    def send(self, plan: StepPlan) -> Round:
        began = time.monotonic()
        message = encode(plan)
        encoded = time.monotonic()
        self._plans.send(message)
        answer = self._results.receive(10)
        assert answer is not None
        decode_result(answer)
        ended = time.monotonic()
        said = [status.receive(10) for status in self._status]
        had = [json.loads(one) for one in said if one is not None]
        return Round(encoded - began, max(had) - began, ended - began)

    def close(self) -> None:
        self._plans.send(b"")
        for child in self._children:
            child.wait(10)
        self._plans.close()
        for reader in (self._results, *self._status):
            reader.close()
        for bell in self._bells:
            os.close(bell)
        for file in self.folder.iterdir():
            file.unlink()
        self.folder.rmdir()


def spread(seconds: list[float]) -> str:
    return f"{median(seconds) * 1e6:.0f}, {quantiles(seconds, n=100)[-1] * 1e6:.0f} µs"


def measure(sizes: list[int], rounds: int) -> list[str]:
    lines = [
        "| ranks | plan | bytes | encoded | at the last rank: median, 99 % | result back: median, 99 % |",
        "|---|---|---|---|---|---|",
    ]
    for size in sizes:
        ranks = Ranks(size)
        for name, plan in PLANS_TIMED.items():
            timed = []
            for _ in range(rounds):
                time.sleep(PAUSE_S)
                timed.append(ranks.send(plan))
            encoded = median(one.encode_s for one in timed) * 1e6
            last, back = spread([t.last_rank_s for t in timed]), spread([t.result_s for t in timed])
            lines.append(f"| {size} | {name} | {len(encode(plan)):,} | {encoded:.0f} µs | {last} | {back} |")
        ranks.close()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        be_rank(args.folder, args.rank, args.rank_of)
    else:
        print("\n".join(measure(args.ranks, args.rounds)))


if __name__ == "__main__":
    main()
