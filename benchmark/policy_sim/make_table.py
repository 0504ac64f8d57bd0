"""The cost table that a server measured when it started, as a file; and how steps that it ran later agree.

    python benchmark/policy_sim/make_table.py --study docs/data/h200/auto_study.jsonl \\
        --out docs/data/h200/auto_table.json

The study (``benchmark/h200/auto_study.py``) keeps both: what the start measured, and device times of steps
of one draft length and number of streams.

``--times`` makes it another table, to see in the simulator what that is worth: ``rising``, as if a step of
more rows never took less time; ``structure``, as if it took what its query tokens and draft forwards take.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.policy_sim.structure import structure_of, timed
from sglang.srt.model_executor.step_plan import SpecShape, StepCost
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.cost_table import CostTable

Case = tuple[int, int, int]  # context, draft length, streams
MEASURED, RISING, STRUCTURE = TIMES = ("measured", "rising", "structure")


class StudyError(ValueError):
    """A file that holds no measured costs."""


def measured(lines: Sequence[dict[str, Any]], source: str) -> AutoTable:
    """Of the study's own server: its first start."""
    start = next((x for x in lines if x["kind"] == "start" and x["info"].get("costs")), None)
    if start is None:
        raise StudyError(f"{source} has no start with step costs: make it with benchmark/h200/auto_study.py")
    # Of steps whose rows have the same draft length: the other ones are made of these.
    costs = [StepCost(**cost) for cost in start["info"]["costs"] if not cost.get("tokens")]
    return AutoTable(
        device=str(start["device"]),
        model="Llama-3.1-8B shape, dummy weights",
        drafter="EAGLE-3, one layer",
        shape=SpecShape(*start["shape"]),
        table=CostTable.from_costs(costs, padded=bool(start["info"]["graphs"])),
        note=f"as measured at the start of the server of {source}: {len(timed(costs))} of {len(costs)} sizes "
        "were timed, the others lie on straight lines between them",
    )


def retimed(made: AutoTable, times: str) -> AutoTable:
    """With the times of steps that ``times`` names instead of the measured ones."""
    costs = made.table.costs
    if times == RISING:
        by_length = [[c for c in costs if c.draft_len == k] for k in made.table.draft_lens]
        changed = [cost for of_length in by_length for cost in _rising(of_length)]
    else:
        structure = structure_of(costs)
        changed = [replace(c, fixed_s=structure.fixed_s(c.draft_len, c.rows)) for c in costs]
    table = CostTable.from_costs(changed, made.table.padded)
    return replace(made, table=table, note=f"{made.note}; then made {times}")


def _rising(costs: Sequence[StepCost]) -> list[StepCost]:
    """The nearest times that do not fall with the rows: means of neighbours where they do."""
    groups: list[list[StepCost]] = []
    for cost in costs:
        groups.append([cost])
        while len(groups) > 1 and _mean_s(groups[-2]) > _mean_s(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    return [replace(cost, fixed_s=_mean_s(group)) for group in groups for cost in group]


def _mean_s(costs: Sequence[StepCost]) -> float:
    return sum(cost.fixed_s for cost in costs) / len(costs)


def agreement(lines: Sequence[dict[str, Any]], table: CostTable) -> dict[Case, float]:
    """Device time of a step / what the table says, less 1: the median of each case's segments."""
    found: dict[Case, list[float]] = defaultdict(list)
    for x in lines:
        if x["kind"] != "segment" or x["eager_steps"] or len(x["steps"]) != 1:
            continue
        ((length, number),) = x["steps"].items()
        said = table.seconds(int(length), x["streams"], x["kv_tokens"])
        found[x["context"], int(length), x["streams"]].append(x["device_s"] / number / said - 1.0)
    return {case: median(errors) for case, errors in sorted(found.items())}


def markdown(errors: dict[Case, float]) -> list[str]:
    """By context and draft length: the streams, % that steps took more or less than the table says."""
    streams = sorted({case[2] for case in errors})
    rows = [
        f"| {context} | {length} | "
        + " | ".join(
            f"{100 * errors[context, length, n]:+.0f}" if (context, length, n) in errors else ""
            for n in streams
        )
        + " |"
        for context, length in dict.fromkeys(case[:2] for case in errors)
    ]
    return [
        f"| context | drafts | {' | '.join(map(str, streams))} |",
        "|---|---|" + "---|" * len(streams),
        *rows,
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--study", type=Path, required=True, help="JSONL of benchmark/h200/auto_study.py")
    parser.add_argument("--out", type=Path, required=True, help="JSON as --speculative-auto-table reads it")
    parser.add_argument("--times", choices=TIMES, default=MEASURED, help="default: %(default)s")
    args = parser.parse_args(argv)
    lines = [json.loads(text) for text in args.study.read_text().splitlines()]
    made = measured(lines, args.study.name)
    if args.times != MEASURED:
        made = retimed(made, args.times)
    args.out.write_text(made.to_json())
    print(made.note)
    print("\n".join(markdown(agreement(lines, made.table))))


if __name__ == "__main__":
    main()
