"""Policies for the draft length, replayed on one cost table and the same traces.

    python benchmark/policy_sim/simulate.py --costs TABLE.json --trace all --out regret.jsonl
    python benchmark/policy_sim/simulate.py --table regret.jsonl      # the Markdown tables

``TABLE.json`` is what ``python -m sglang.tune_spec --save`` or ``make_table.py`` writes. A trace is the name
of a load (``workload.py``) or a file of ``benchmark/traces.py``. Regret: 1 - tokens a second / those of the
best draft length at every decode step that the policy ran, with the true costs and chances known. Steps take
what ``--truth`` says (another table of the same lengths), or what the policies are told, ``--costs``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.policy_sim.engine import Simulation, Truth
from benchmark.policy_sim.policies import Auto, Policy, Schedule, Threshold, best_schedule
from benchmark.policy_sim.published import AcceptanceAverage, Exp3, Goodput, Ucb
from benchmark.policy_sim.structure import with_ragged
from benchmark.policy_sim.tables import markdown, rounded
from benchmark.policy_sim.workload import (
    MIXTURES,
    RECIPES,
    Phase,
    Workload,
    chances,
    first_chance,
    make_workload,
    requests_of,
)
from benchmark.traces import read_trace
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.cost_table import CostTable

THRESHOLDS = (4, 8, 16, 32, 64, 96, 128, 192)
CALIBRATION_LENGTH = 2.0  # tokens of a step with 3 drafts, of the workload an offline table is made with
CALIBRATION_KV = 640  # tokens of a row's context there
OWN = "auto, own lengths"  # rows may have draft lengths of their own
Make = Callable[[int], Policy]  # from a seed


def policies(table: CostTable, num_steps: int) -> dict[str, Make]:
    """All that are compared, by name."""
    lengths = [k for k in table.draft_lens if 0 < k <= num_steps]
    parts = chances(first_chance(CALIBRATION_LENGTH), num_steps)
    schedule = best_schedule(table, parts, CALIBRATION_KV, table.max_rows(0))
    made: dict[str, Make] = {"plain": lambda seed: Threshold(0, num_steps)}
    for k in lengths:
        made[f"always {k}"] = lambda seed, k=k: Threshold(None, k)  # type: ignore[misc]
    for rows in THRESHOLDS:
        made[f"threshold {rows}"] = lambda seed, rows=rows: Threshold(rows, num_steps)  # type: ignore[misc]
    made["batch-size table"] = lambda seed: Schedule(schedule)
    made["acceptance average"] = lambda seed: AcceptanceAverage(lengths, num_steps)
    made["goodput"] = lambda seed: Goodput(table)
    made["bandit UCB"] = lambda seed: Ucb(table, by_size=False)
    made["bandit UCB by size"] = lambda seed: Ucb(table, by_size=True)
    made["bandit EXP3"] = lambda seed: Exp3(table, seed)
    made["auto"] = lambda seed: Auto(table, num_steps)
    made["auto, no probes"] = lambda seed: Auto(table, num_steps, probe_fraction=0.0)
    return made


def own_lengths(table: CostTable, num_steps: int) -> Make:
    """`auto` whose rows may have draft lengths of their own. Its costs are estimates: by name alone."""
    own = with_ragged(table)
    return lambda seed: Auto(own, num_steps, num_slots=table.max_rows(0))


def workload_of(trace: str, seed: int, seconds: float, length: float) -> Workload:
    if trace in RECIPES or trace in MIXTURES:
        return make_workload(trace, seed, seconds)
    arrivals = read_trace(Path(trace))
    lengths = {arrival.domain: length for arrival in arrivals}
    return Workload(Path(trace).stem, requests_of(arrivals, seed, {}), (Phase(0.0, lengths),))


def run(args: argparse.Namespace) -> Iterator[dict[str, object]]:
    loaded = AutoTable.from_json(args.costs.read_text())
    true = AutoTable.from_json((args.truth or args.costs).read_text()).table
    if true.draft_lens != loaded.table.draft_lens:
        raise SystemExit(f"--truth has draft lengths {true.draft_lens}, --costs {loaded.table.draft_lens}")
    made = policies(loaded.table, loaded.shape.num_steps)
    if OWN in args.policy:
        made[OWN] = own_lengths(loaded.table, loaded.shape.num_steps)
        true = with_ragged(true)
    chosen = made if args.policy == ["all"] else {name: made[name] for name in args.policy}
    traces = list(RECIPES) if args.trace == ["all"] else args.trace
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    cases = [(t, n, seed) for t in traces for n in chosen for seed in seeds]
    for trace, name, seed in tqdm(cases, unit="run", disable=args.quiet):
        workload = workload_of(trace, seed, args.seconds, args.accept_length)
        truth = Truth(true, workload, loaded.shape.num_steps)
        result = Simulation(workload, truth, chosen[name](seed), seed).run()
        yield {
            "trace": workload.name,
            "policy": name,
            "seed": seed,
            "regret": result.regret,
            **asdict(result),
        }


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--costs", type=Path, help="JSON as --speculative-auto-table reads it")
    parser.add_argument("--truth", type=Path, help="what steps take, if not what --costs says")
    parser.add_argument(
        "--trace", nargs="+", default=["all"], help=f"{', '.join([*RECIPES, *MIXTURES])}, a file, or all"
    )
    parser.add_argument(
        "--policy", nargs="+", default=["all"], help=f"names as in the table, all, or {OWN!r}"
    )
    parser.add_argument("--out", type=Path, help="JSONL, one line a run")
    parser.add_argument("--seconds", type=float, default=40.0, help="of a trace (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each case (default: %(default)s)")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--accept-length", type=float, default=2.0, help="tokens of a 3-draft step, of a file's requests"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.add_argument("--table", type=Path, help="print the tables of a JSONL written before, run nothing")
    args = parser.parse_args(argv)
    if args.table is None and (args.costs is None or args.out is None):
        parser.error("give --costs and --out to run, or --table to print the tables of a run")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(argv)
    if args.table is None:
        with args.out.open("w") as out:
            for line in run(args):
                out.write(json.dumps(rounded(line)) + "\n")
                out.flush()
    lines = [json.loads(text) for text in (args.table or args.out).read_text().splitlines()]
    print("\n".join(markdown(lines)))


if __name__ == "__main__":
    main()
