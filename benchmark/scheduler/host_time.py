"""What the scheduler itself takes for a decode step: a device that answers at once, requests that stream.

    python benchmark/scheduler/host_time.py                        # 128 rows, plain and with 3 drafts
    python benchmark/scheduler/host_time.py --baseline FOLDER      # against another checkout, in one process
    python benchmark/scheduler/host_time.py --profile              # where the time goes
    python benchmark/scheduler/host_time.py --auto --rows 256      # auto, one draft length or the rows' own

CPU time of the thread, without the device, the sockets and the other processes; the messages to the
detokenizer are made and encoded. Versions take turns run by run, and medians are compared, so that a busy
machine moves both.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS = 3
PROMPT = 32
MODULES = (
    "managers.io_struct", "managers.metrics", "managers.scheduler", "managers.scheduler_config",
    "mem_cache.radix_cache", "model_executor.step_plan", "sampling.sampling_params", "speculative.controller",
    "speculative.cost_table", "speculative.toggle",
)  # fmt: skip
AUTO_LENGTHS = {"one length": False, "own lengths": True}


class Version:
    """The scheduler's modules of one checkout, beside those of others in one process."""

    def __init__(self, root: Path) -> None:
        held = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "sglang"}
        sys.path.insert(0, str(root / "python"))
        try:
            found = {name: importlib.import_module(f"sglang.srt.{name}") for name in MODULES}
        finally:
            sys.path.pop(0)
            for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
                del sys.modules[name]
            sys.modules.update(held)
        self.names: dict[str, Any] = {}
        for module in found.values():
            self.names |= vars(module)

    def __getattr__(self, name: str) -> Any:
        return self.names[name]


class InstantStep:
    """Its result is there already."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def wait(self) -> Any:
        return self._result


class InstantExecutor:
    """Every row accepts so many drafts as the steps before it in a fixed order; tokens mean nothing."""

    def __init__(self, version: Version, rows: int, places: int, own: bool = False) -> None:
        """``own``: with steps whose rows have draft lengths of their own."""
        self._version = version
        fields: dict[str, Any] = {"draft_lens": (1, 2, NUM_STEPS)} if "StepCost" in version.names else {}
        if own:
            sizes = {
                k: tuple((rows, half * rows // 2) for half in range(k + 2, 2 * k + 2)) for k in (1, 2, 3)
            }
            sets = [version.GraphSet(k, (rows,), 0.0, 0, sizes[k]) for k in sizes]
            fields["graphs"] = (version.GraphSet(0, (rows,), 0.0, 0), *sets)
        self.info = version.ExecutorInfo(
            num_slots=rows, num_pages=rows * places, page_size=1, context_len=places, vocab_size=1000,
            spec=version.SpecShape(NUM_STEPS), max_spec_rows=rows, **fields,
        )  # fmt: skip
        rng = random.Random(0)
        self._accepted = [rng.choice((0, 1, 1, 2, 3)) for _ in range(997)]

    def launch(self, plan: Any) -> InstantStep:
        tokens = []
        drafts = getattr(plan, "row_drafts", ()) or (plan.draft_len,) * len(plan.decode_slots)
        for row, most in enumerate(drafts):
            accepted = min(most, self._accepted[(plan.step_id * 131 + row) % 997])
            tokens.append((7,) * (1 + accepted))
        tokens += [(7,) if chunk.next_id is None else () for chunk in plan.prefill]
        return InstantStep(
            self._version.StepResult(plan.step_id, tuple(tokens), (False,) * len(tokens), 0.01)
        )

    def shutdown(self) -> None:
        """There is nothing to end."""


@dataclass(frozen=True, slots=True)
class Load:
    rows: int
    threshold: int | None  # None: always speculate; 0: never
    steps: int
    own: bool | None = None  # under auto: whether rows may have draft lengths of their own


class Bench:
    """One version under one load, its requests admitted."""

    def __init__(self, version: Version, load: Load) -> None:
        self._steps = load.steps
        places = PROMPT + (NUM_STEPS + 1) * (load.steps + 8)
        executor = InstantExecutor(version, load.rows, places, bool(load.own))
        auto = {} if load.own is None else {"auto": controller(version, executor.info, load.rows)}
        self.scheduler = version.Scheduler(
            **auto,
            executor=executor,
            config=version.SchedulerConfig(
                max_running_requests=load.rows,
                speculative_disable_bs_threshold="auto" if auto else load.threshold,
                decode_log_interval=40,
            ),
            policy=version.decide_by_threshold,
            cache=version.RadixCache(1),
            decode=lambda ids: "",
            eos_ids=(3,),
            emit=version.encode,
            reply=lambda reply: None,
            metrics=version.NullSink(),
            clock=time.time,
        )
        params = version.SamplingParams(max_new_tokens=places, ignore_eos=True)
        for index in range(load.rows):
            prompt = [index % 900 + 10, *range(10, 9 + PROMPT)]
            self.scheduler.receive(version.GenerateRequest(f"r{index:032d}", prompt, params, True, 0.0))
        while self.scheduler.table.waiting or self.scheduler.table.prefilling:
            self.scheduler.step()
        self.scheduler.step()

    def run(self) -> float:
        """Microseconds of a step."""
        began = time.thread_time()
        for _ in range(self._steps):
            self.scheduler.step()
        return (time.thread_time() - began) / self._steps * 1e6


def controller(version: Version, info: Any, rows: int) -> Any:
    """Steps of own lengths are the cheapest, where there are any."""
    costs = [version.StepCost(k, rows, 1.0, 0.0) for k in range(NUM_STEPS + 1)]
    costs += [version.StepCost(s.draft_len, s.rows, 0.2, 0.0, s.tokens) for s in info.ragged_sizes]
    table = version.CostTable.from_costs(costs, padded=True)
    return version.AutoController(table, NUM_STEPS, num_slots=rows if info.ragged_sizes else 0)


def compare_auto(version: Version, rows: int, steps: int, runs: int) -> dict[str, list[float]]:
    """Of one version, by AUTO_LENGTHS. The first run of each warms up."""
    found: dict[str, list[float]] = {name: [] for name in AUTO_LENGTHS}
    for _ in range(runs + 1):
        for name, own in AUTO_LENGTHS.items():
            found[name].append(Bench(version, Load(rows, None, steps, own)).run())
    return {name: micros[1:] for name, micros in found.items()}


def compare(versions: dict[str, Version], load: Load, runs: int) -> dict[str, list[float]]:
    """The first run of each warms up."""
    found: dict[str, list[float]] = {name: [] for name in versions}
    for _ in range(runs + 1):
        for name, version in versions.items():
            found[name].append(Bench(version, load).run())
    return {name: micros[1:] for name, micros in found.items()}


def print_profile(version: Version, load: Load) -> None:
    bench = Bench(version, load)
    profile = cProfile.Profile()
    profile.runcall(bench.run)
    pstats.Stats(profile).sort_stats("tottime").print_stats(30)


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--steps", type=int, default=100, help="of a run")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--baseline", type=Path, help="another checkout of this project")
    parser.add_argument("--auto", action="store_true", help="what draft lengths of the rows' own add to auto")
    parser.add_argument("--profile", action="store_true", help="print where the time goes, and end")
    args = parser.parse_args(argv)
    versions = {"now": Version(ROOT)}
    if args.auto and args.profile:
        print_profile(versions["now"], Load(args.rows, None, args.steps, own=True))
        return 0
    if args.auto:
        own = compare_auto(versions["now"], args.rows, args.steps, args.runs)
        one_us, own_us = (statistics.median(own[name]) for name in AUTO_LENGTHS)
        print(
            f"auto, {args.rows} rows: one length {one_us:.0f} us a step, own lengths {own_us:.0f} us, "
            f"{own_us - one_us:+.0f} us, ratio {own_us / one_us:.2f}"
        )
        return 0
    if args.baseline is not None:
        versions["baseline"] = Version(args.baseline)
    for mode, threshold in (("plain", 0), (f"{NUM_STEPS} drafts", None)):
        load = Load(args.rows, threshold, args.steps)
        if args.profile:
            print_profile(versions["now"], load)
            continue
        found = {
            name: statistics.median(micros) for name, micros in compare(versions, load, args.runs).items()
        }
        line = ", ".join(f"{name} {micros:.0f} us" for name, micros in found.items())
        ratio = f", ratio {found['now'] / found['baseline']:.2f}" if "baseline" in found else ""
        print(f"{mode}, {args.rows} rows: {line} a step{ratio}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
