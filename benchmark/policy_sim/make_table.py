"""A cost table of all draft lengths from step times of plain decode and of one draft length.

    python benchmark/policy_sim/make_table.py --step-times docs/data/h200/step_times.jsonl \\
        --out docs/data/h200/auto_table_interpolated.json

For as long as no table was measured by the server itself. The lengths between are interpolated by what a
step is made of (``structure.py``); what the KV cache costs is bytes over bandwidth, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.policy_sim.structure import structure_of
from sglang.srt.model_executor.graph_sizes import default_sizes
from sglang.srt.model_executor.step_plan import SpecShape, StepCost
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.cost_table import CostTable

KV_BYTES: Final = 131_072  # a token of the Llama-3.1-8B shape in bf16: 32 layers, 8 heads of 128, K and V
BANDWIDTH: Final = 4.1e12  # bytes a second, decode attention of many rows (docs/h200.md, "Attention")
MEAN_LEN: Final = 1152  # prompts of 1024 tokens, 256 outputs: the mean over the measured steps
NUM_STEPS: Final = 3


def measured(lines: Sequence[dict[str, Any]]) -> list[StepCost]:
    """The better of the passes for each size of plain steps (with the drafter) and of 3 drafts."""
    best: dict[tuple[int, int], float] = {}
    for x in lines:
        if x.get("kind") == "decode" and x["drafter"] and x["mode"] in ("plain", "spec"):
            key = (0 if x["mode"] == "plain" else NUM_STEPS, int(x["batch"]))
            best[key] = min(best.get(key, float("inf")), float(x["wall_step_s"]))
    per_token = KV_BYTES / BANDWIDTH
    return [StepCost(k, n, seconds - per_token * MEAN_LEN * n, per_token) for (k, n), seconds in best.items()]


def interpolated(lines: Sequence[dict[str, Any]], source: str, max_rows: int) -> AutoTable:
    structure = structure_of(measured(lines))
    costs = [structure.cost(k, n) for k in range(NUM_STEPS + 1) for n in default_sizes(max_rows)]
    return AutoTable(
        device=str(lines[0]["device"]),
        model="Llama-3.1-8B shape, dummy weights",
        drafter="EAGLE-3, one layer",
        shape=SpecShape(NUM_STEPS),
        table=CostTable.from_costs(costs, padded=True),
        note=f"interpolated from {source}: measured are plain steps at 1, 2, 4, … 256 rows and 3 drafts at "
        "1 … 128; 1 and 2 drafts, other sizes and 3 drafts beyond 128 rows follow from what a step is made "
        "of (benchmark/policy_sim/structure.py); per_kv_token_s is bytes over bandwidth",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--step-times", type=Path, required=True, help="JSONL of benchmark/h200/step_times.py"
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON as --speculative-auto-table reads it")
    parser.add_argument("--max-rows", type=int, default=256)
    args = parser.parse_args()
    lines = [json.loads(text) for text in args.step_times.read_text().splitlines()]
    args.out.write_text(interpolated(lines, args.step_times.name, args.max_rows).to_json())


if __name__ == "__main__":
    main()
