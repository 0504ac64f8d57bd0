"""The best draft length by rows, acceptance and context, and its gain over the better of plain and longest.

    python benchmark/policy_sim/best_lengths.py --costs TABLE.json

Acceptance is that of every row: tokens of a step with 3 drafts, each draft's chance 0.95 of the one before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.policy_sim.workload import chances, first_chance, tokens_of
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.cost_table import CostTable

ROWS = (1, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)


def best(table: CostTable, length: float, rows: int, kv: int) -> tuple[int, float]:
    """The length with the most tokens a second, and its gain over the better of plain and the longest."""
    longest = table.draft_lens[-1]
    parts = chances(first_chance(length), longest)
    rates = {k: tokens_of(parts[:k]) / table.seconds(k, rows, kv * rows) for k in table.draft_lens}
    chosen = max(rates, key=lambda k: rates[k])
    return chosen, rates[chosen] / max(rates[0], rates[longest]) - 1.0


def markdown(table: CostTable, lengths: Sequence[float], contexts: Sequence[int]) -> list[str]:
    lines = [
        f"| tokens a 3-draft step | context | {' | '.join(map(str, ROWS))} |",
        "|---|---|" + "---|" * len(ROWS),
    ]
    for length in lengths:
        for kv in contexts:
            found = [best(table, length, rows, kv) for rows in ROWS]
            cells = [f"{k} {100 * gain:+.0f} %" if gain >= 0.005 else str(k) for k, gain in found]
            lines.append(f"| {length} | {kv} | {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--costs", type=Path, required=True, help="JSON as --speculative-auto-table reads it")
    parser.add_argument("--lengths", type=float, nargs="+", default=[1.3, 1.5, 2.0, 2.5])
    parser.add_argument("--kv", type=int, nargs="+", default=[1024, 16384], help="tokens of a row's context")
    args = parser.parse_args(argv)
    print("\n".join(markdown(AutoTable.from_json(args.costs.read_text()).table, args.lengths, args.kv)))


if __name__ == "__main__":
    main()
