"""A burst of requests through the scheduler in this process: plain, always, a fixed threshold, and `auto`.

    python benchmark/h200/burst.py --out burst.jsonl      # the same as auto_study.py --parts burst
    python benchmark/h200/burst.py --plot burst.jsonl --picture burst.png
    python benchmark/h200/burst.py --table burst.jsonl

Lone requests, then hundreds at once, then lone ones again, more than once. All modes get the same arrivals
and put out the same tokens, so what counts is the time in which there was something to do.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.h200.burst_stats import by_second, gaps, longest_near, near_switch_ratio, num_switches
from benchmark.h200.executors import Records
from benchmark.h200.in_process import REAL_TIME, Clock, InProcess, Mode, StepRecord
from benchmark.h200.open_loop import PromptOf, modes_of, run_trace
from benchmark.traces import BURST, TraceOptions, arrivals
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.executor import Executor

STEADY = ("plain", "always")
MODES = (*STEADY, "threshold", "auto")
COLOURS = ("#4477aa", "#ee8866", "#228833", "#aa3377", "#bbbbbb", "#ccbb44")


class Burst:
    def __init__(
        self,
        executor: Executor,
        options: TraceOptions,
        threshold: int,
        prompt_of: PromptOf,
        out: Records,
        clock: Clock = REAL_TIME,
    ) -> None:
        self._executor, self._options, self._threshold = executor, options, threshold
        self._prompt_of, self._out, self._clock = prompt_of, out, clock

    def run(self, labels: dict[str, object], cached: bool) -> None:
        """``cached``: prompts may come again, and are then found in the prefix cache, in every mode."""
        info = self._executor.info
        config = SchedulerConfig(max_running_requests=info.num_slots, chunked_prefill_size=info.default_chunk)
        cache = RadixCache(info.page_size) if cached else None
        engine = InProcess(self._executor, config, cache, self._clock)
        trace = arrivals(BURST, 0, self._options)
        steps: dict[str, list[StepRecord]] = {}
        for mode in ([modes_of(self._threshold)[0]] if cached else []) + modes_of(self._threshold):
            steps[mode.name] = self._run_mode(engine, mode, trace, labels)
        steady = [gaps(steps[name]) for name in STEADY]
        for name, records in steps.items():
            of_mode = gaps(records)
            ratio = near_switch_ratio(of_mode, steady)
            if ratio is not None:
                self._out.add(
                    "switch", **labels, mode=name, p99_ratio=ratio[0], steps=ratio[1],
                    longest=longest_near(of_mode, records[0].launched_s),
                )  # fmt: skip

    def _run_mode(
        self, engine: InProcess, mode: Mode, trace: list[Any], labels: dict[str, object]
    ) -> list[StepRecord]:
        engine.set_mode(mode)
        engine.executor.label = mode.name
        began = self._clock.now()
        run_trace(engine, trace, self._prompt_of)
        wall = self._clock.now() - began
        records = list(engine.records)
        engine.records.clear()
        engine.finished.clear()
        tokens = sum(arrival.output_len for arrival in trace)
        busy = sum(record.gap_s for record in records)
        self._out.add(
            "burst", **labels, mode=mode.name, tokens=tokens, busy_s=busy, wall_s=wall,
            most_rows=max(record.num_rows for record in records), switches=num_switches(records),
            eager_steps=sum(record.used_graph is False for record in records),
            by_second=by_second(records, began),
        )  # fmt: skip
        return records


def burst_tables(lines: Sequence[dict[str, Any]]) -> list[str]:
    runs = {line["mode"]: line for line in lines if line["kind"] == "burst"}  # the last of each counts
    if not runs:
        return []
    ratios = {line["mode"]: line["p99_ratio"] for line in lines if line["kind"] == "switch"}
    rates = {mode: run["tokens"] / run["busy_s"] for mode, run in runs.items()}
    text = [
        f"### A burst to {max(run['most_rows'] for run in runs.values())} rows",
        "",
        "| mode | tok/s while busy | auto / it | busy s | whole s | switches"
        " | p99 near a switch / slower mode's | eager steps |",
        "|" + "---|" * 8,
    ]
    for mode, run in runs.items():
        ratio = f"{ratios[mode]:.3f}" if mode in ratios else ""
        cells = [mode, f"{rates[mode]:.0f}", f"{rates['auto'] / rates[mode]:.3f}", f"{run['busy_s']:.2f}"]
        cells += [f"{run['wall_s']:.2f}", str(run["switches"]), ratio, str(run["eager_steps"])]
        text.append("| " + " | ".join(cells) + " |")
    return text


def draw(lines: Sequence[dict[str, Any]], picture: Path) -> None:
    """Rows and tokens a second of each mode, and which steps it ran."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    runs = {line["mode"]: line["by_second"] for line in lines if line["kind"] == "burst"}
    lens = sorted({int(k) for of in runs.values() for line in of for k in line["steps"]})
    figure, axes = plt.subplots(2 + len(runs), 1, figsize=(10, 5 + 1.2 * len(runs)), sharex=True)
    for (mode, of), colour in zip(runs.items(), COLOURS, strict=False):
        seconds = [line["second"] for line in of]
        axes[0].plot(seconds, [line["rows"] for line in of], label=mode, color=colour)
        axes[1].plot(seconds, [line["tokens"] for line in of], label=mode, color=colour)
    axes[0].set_ylabel("decoding rows")
    axes[1].set_ylabel("tokens/s")
    axes[0].legend()
    for axis, (mode, of) in zip(axes[2:], runs.items(), strict=True):
        floor = [0.0] * len(of)
        for draft_len, colour in zip(lens, COLOURS, strict=False):
            total = [max(1, sum(line["steps"].values())) for line in of]
            share = [line["steps"].get(str(draft_len), 0) / n for line, n in zip(of, total, strict=True)]
            name = f"{draft_len} drafts" if draft_len else "plain"
            axis.bar([line["second"] for line in of], share, 1.0, floor, color=colour, label=name)
            floor = [a + b for a, b in zip(floor, share, strict=True)]
        axis.set_ylabel(mode)
        axis.set_yticks([])
    axes[2].legend(loc="upper right", ncols=len(lens))
    axes[-1].set_xlabel("second")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, help="make the table from this file and run nothing")
    parser.add_argument("--plot", type=Path, help="draw this file's runs and run nothing")
    parser.add_argument("--picture", type=Path, default=Path("burst.png"))
    args, rest = parser.parse_known_args(argv)
    if args.table is None and args.plot is None:
        # Only now: a picture is drawn where no model runs.
        from benchmark.h200 import auto_study

        return auto_study.main([*rest, "--parts", "burst"])
    if rest:
        parser.error(f"unknown: {' '.join(rest)}")
    lines = [json.loads(line) for line in (args.table or args.plot).read_text().splitlines()]
    if args.plot is not None:
        draw(lines, args.picture)
        print(args.picture)
    else:
        print("\n".join(burst_tables(lines)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
