"""What a burst was, from its steps: rates, seconds, switches, and the steps after them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmark.h200.in_process import StepRecord

NEAR = 20  # steps of a switch


@dataclass(frozen=True, slots=True)
class Gap:
    """A decode step right behind another one: nothing was prefilled between them."""

    draft_len: int
    bucket: int
    seconds: float
    is_near: bool  # within NEAR steps of a switch
    num_rows: int = 0
    done_s: float = 0.0


def bucket_of(rows: int) -> int:
    """Rows whose steps take about as long: one graph's, on a GPU up to 64 rows more or less."""
    if rows <= 8:
        return rows
    return -(-rows // 8) * 8


def gaps(records: Sequence[StepRecord]) -> list[Gap]:
    found, last_len, since = [], None, NEAR
    after_decode = False
    for record in records:
        if record.num_rows == 0:
            after_decode = False
            continue
        if last_len is not None and record.draft_len != last_len:
            since = 0
        if after_decode:
            bucket = bucket_of(record.num_rows)
            near, rows = since < NEAR, record.num_rows
            found.append(Gap(record.draft_len, bucket, record.gap_s, near, rows, record.done_s))
        since, last_len, after_decode = since + 1, record.draft_len, True
    return found


def longest_near(of_mode: Sequence[Gap], began_s: float, count: int = 4) -> list[dict[str, Any]]:
    """The longest steps near a switch: when they ended, and of how many rows."""
    near = sorted((gap for gap in of_mode if gap.is_near), key=lambda gap: -gap.seconds)
    return [
        {"second": g.done_s - began_s, "ms": 1e3 * g.seconds, "rows": g.num_rows, "draft_len": g.draft_len}
        for g in near[:count]
    ]


def num_switches(records: Sequence[StepRecord]) -> int:
    lens = [record.draft_len for record in records if record.num_rows]
    return sum(a != b for a, b in zip(lens, lens[1:], strict=False))


def near_switch_ratio(of_mode: Sequence[Gap], steady: Sequence[Sequence[Gap]]) -> tuple[float, int] | None:
    """p99 of the steps near a switch beside the p99 of the slower mode's own steps; and how many there were.

    ``steady``: gaps of the runs that never switch. Steps of different batches are made comparable by the
    slower run's median at their size; sizes that the steady runs did not have are left out.
    """
    medians = [_medians(run) for run in steady]
    shared = set.intersection(*(set(of) for of in medians))
    slower = {b: max(range(len(steady)), key=lambda run: medians[run][b]) for b in shared}
    scale = {b: medians[slower[b]][b] for b in shared}
    near = [g.seconds / scale[g.bucket] for g in of_mode if g.is_near and g.bucket in shared]
    if not near:
        return None
    met = {g.bucket for g in of_mode if g.is_near}
    own = [
        g.seconds / scale[g.bucket]
        for run, gaps_of in enumerate(steady)
        for g in gaps_of
        if g.bucket in shared & met and slower[g.bucket] == run
    ]
    return p99(near) / p99(own), len(near)


def _medians(run: Sequence[Gap]) -> dict[int, float]:
    by_bucket: dict[int, list[float]] = {}
    for gap in run:
        by_bucket.setdefault(gap.bucket, []).append(gap.seconds)
    return {bucket: statistics.median(values) for bucket, values in by_bucket.items()}


def p99(values: Sequence[float]) -> float:
    """The value that 99 of 100 do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-99 * len(ordered) // 100) - 1)]


def by_second(records: Sequence[StepRecord], began_s: float) -> list[dict[str, Any]]:
    """One line a second: steps by draft length, mean rows, tokens."""
    seconds: dict[int, list[StepRecord]] = {}
    for record in records:
        seconds.setdefault(int(record.done_s - began_s), []).append(record)
    lines = []
    for second, of in sorted(seconds.items()):
        decode = [record for record in of if record.num_rows]
        steps: dict[str, int] = {}
        for record in decode:
            steps[str(record.draft_len)] = steps.get(str(record.draft_len), 0) + 1
        lines.append(
            {
                "second": second,
                "steps": dict(sorted(steps.items())),
                "rows": statistics.fmean(record.num_rows for record in decode) if decode else 0.0,
                "tokens": sum(record.num_tokens for record in of),
                "prefill_steps": len(of) - len(decode),
            }
        )
    return lines
