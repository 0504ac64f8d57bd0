"""`auto` with and without draft lengths of the rows' own: what `ragged.py --auto` runs.

The scheduler runs in this process over the executor, and its batch goes on through all segments of a point.
Two of `auto` take turns, each learning from its own steps alone: one may give rows draft lengths of their
own, the other may not. Half of the rows accept much, half little, and neither is told which.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmark.h200.executors import CHAIN, Records, Wanted, started
from benchmark.h200.in_process import InProcess, Mode, StepRecord
from benchmark.h200.ragged import MIXES, fill
from benchmark.h200.shapes import write_shapes
from sglang.srt.model_executor.executor import Executor, PendingStep
from sglang.srt.model_executor.graph_sizes import ragged_keys
from sglang.srt.model_executor.step_plan import ExecutorInfo, GraphSet, StepCost, StepMidInput, StepPlan
from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.controller import AutoController, CommittedStep
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.simulate import SimulatedAcceptance
from sglang.srt.speculative.toggle import Decision

COMMON, OWN = "one length", "own lengths"
AUTO = Mode("auto", "auto")


@dataclass(frozen=True, slots=True)
class Sizes:
    streams: tuple[int, ...]
    context: int
    settling: int  # steps of each before the rounds
    rounds: int
    steps: int  # of a segment

    @property
    def most_steps(self) -> int:
        return 2 * (self.settling + self.rounds * self.steps) + 8

    @property
    def room(self) -> int:
        """Places of a row beside its context: 2.5 tokens a step are the most that a mix has."""
        return 3 * self.most_steps + 8


FULL = Sizes((64, 128, 256), 1024, 80, 4, 40)  # rounds: an even number, since contexts grow
TINY = Sizes((4,), 16, 4, 1, 4)


class InTurn(AutoController):
    """Two of them; ``name`` says which one's turn it is."""

    def __init__(self, info: ExecutorInfo) -> None:
        assert info.spec is not None
        table = CostTable.from_costs(info.costs, padded=bool(info.graphs))
        super().__init__(table, info.spec.num_steps, num_slots=info.num_slots)
        self._common = AutoController(CostTable(table.curves, table.padded), info.spec.num_steps)
        self.name = COMMON

    def decide(self, state: AutoInput) -> Decision:
        return super().decide(state) if self.name == OWN else self._common.decide(state)

    def observe(self, step: CommittedStep) -> None:
        # The last step of a segment is committed in the next one: the other learns nothing false from it.
        if self.name == OWN or step.decision.size is not None:
            super().observe(step)
        else:
            self._common.observe(step)


class WithoutGraphs:
    """An executor that captures nothing, as if it had: for trying this out on a CPU."""

    def __init__(self, executor: Executor, rows: Sequence[int]) -> None:
        self._executor, info = executor, executor.info
        keys = ragged_keys({k: [8 * n for n in rows] for k in info.draft_lens})
        own = {
            k: tuple((e.rows // 8, e.tokens // 8) for e in keys if e.draft_len == k) for k in info.draft_lens
        }
        sets = [GraphSet(k, (info.max_spec_rows,), 0.0, 0, own.get(k, ())) for k in (0, *info.draft_lens)]
        table = CostTable.from_costs(info.costs, padded=False)
        costs = [
            StepCost(k, n, table.seconds(k, n, 0.0) * tokens / n / (k + 1), 0.0, tokens)
            for k, sizes in own.items()
            for n, tokens in sizes
        ]
        self.info = replace(info, graphs=tuple(sets), costs=(*info.costs, *costs))

    def launch(self, plan: StepPlan) -> PendingStep:
        return self._executor.launch(plan)

    def supply(self, masks: StepMidInput) -> None:
        self._executor.supply(masks)

    def shutdown(self) -> None:
        self._executor.shutdown()


class Study:
    def __init__(
        self, executor: Executor, simulated: SimulatedAcceptance, sizes: Sizes, out: Records
    ) -> None:
        self._simulated, self._sizes, self._out = simulated, sizes, out
        self._executor = executor

    def run(self) -> None:
        for streams in self._sizes.streams:
            for mix in MIXES:
                self._point(streams, mix)

    def _point(self, streams: int, mix: tuple[float, float]) -> None:
        """Nothing that was learned at another point is known here."""
        sizes, info = self._sizes, self._executor.info
        auto = InTurn(info)
        engine = InProcess(self._executor, auto=auto)
        engine.set_mode(AUTO)
        self._simulated.set_length(*mix)
        prompt = [place % info.vocab_size for place in range(sizes.context)]
        engine.begin([prompt] * streams, info.context_len, skip_prefill=True)
        for name in (COMMON, OWN):
            _segment(engine, auto, name, "settling", sizes.settling)
        for number in range(sizes.rounds):
            for name in (COMMON, OWN) if number % 2 else (OWN, COMMON):
                _segment(engine, auto, name, str(number), sizes.steps)
        engine.end()
        for line in segments(engine.records, streams):
            self._out.add("auto", streams=streams, context=sizes.context, mix=mix, **line)
        beliefs = auto.figures()
        self._out.add("beliefs", streams=streams, mix=mix, corrections=beliefs["cost_corrections"])


def _segment(engine: InProcess, auto: InTurn, name: str, number: str, steps: int) -> None:
    auto.name, engine.executor.label = name, f"{name}/{number}"
    for _ in range(steps):
        engine.step()
    engine.executor.label = ""


def segments(records: Sequence[StepRecord], streams: int) -> Iterator[dict[str, Any]]:
    by_label: dict[str, list[StepRecord]] = {}
    for record in records:
        if "/" in record.label and record.num_rows == streams:
            by_label.setdefault(record.label, []).append(record)
    for label, steps in by_label.items():
        name, number = label.split("/")
        kinds: dict[str, int] = {}
        for step in steps:
            own = step.num_drafts < step.draft_len * streams
            kind = f"{step.draft_len}, {step.num_drafts} drafts" if own else str(step.draft_len)
            kinds[kind] = kinds.get(kind, 0) + 1
        yield {
            "mode": name,
            "round": number,
            "seconds": sum(step.gap_s for step in steps),
            "device_s": sum(step.device_s for step in steps),
            "tokens": sum(step.num_tokens for step in steps),
            "eager_steps": sum(step.used_graph is False for step in steps),
            "steps": kinds,
        }


def tables(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Tokens a second of all segments of a mode; by wall time, the host's work included."""
    names = ("streams", "context", "accept", COMMON, OWN, "gain", "by device time", "steps with own lengths")
    yield f"| {' | '.join(names)} |"
    yield "|---" * len(names) + "|"
    found = [line for line in lines if line["kind"] == "auto" and line["round"] != "settling"]
    for streams, context, mix in dict.fromkeys((x["streams"], x["context"], tuple(x["mix"])) for x in found):
        of = [x for x in found if (x["streams"], tuple(x["mix"])) == (streams, mix)]
        rates = {
            (name, clock): median(x["tokens"] / x[clock] for x in of if x["mode"] == name)
            for name in (COMMON, OWN)
            for clock in ("seconds", "device_s")
        }
        gains = [100 * (rates[OWN, clock] / rates[COMMON, clock] - 1) for clock in ("seconds", "device_s")]
        steps = [(kind, count) for x in of if x["mode"] == OWN for kind, count in x["steps"].items()]
        share = sum(count for kind, count in steps if "drafts" in kind) / sum(count for _, count in steps)
        cells = [streams, context, " and ".join(map(str, mix)), f"{rates[COMMON, 'seconds']:.0f}"]
        cells += [
            f"{rates[OWN, 'seconds']:.0f}",
            *(f"{gain:+.1f} %" for gain in gains),
            f"{100 * share:.0f} %",
        ]
        yield f"| {' | '.join(map(str, cells))} |"


def run(device: str, tiny: bool, out: Records) -> None:
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = ",".join(map(str, MIXES[0]))
    os.environ["SGLANG_SIMULATE_ACC_METHOD"] = "geometric"
    sizes, began = TINY if tiny else FULL, time.perf_counter()
    rows, room = sizes.streams[-1], sizes.room
    with tempfile.TemporaryDirectory(prefix="shapes_") as root:
        wanted = Wanted(
            write_shapes(Path(root), tiny),
            CHAIN,
            device,
            rows,
            total_tokens=rows * (sizes.context + room),
            context_len=sizes.context + room,
            spec_rows=rows,
            graph_sizes=sizes.streams,
            dtype="bfloat16" if device == "cuda" else "float32",
            dummy=True,
            extra=("--speculative-disable-bs-threshold", "auto"),
        )
        with started(wanted, out, "ragged auto") as executor:
            worker, simulated = executor.worker, executor.worker.simulated
            assert isinstance(simulated, SimulatedAcceptance)
            fill(worker)
            out.add("started", seconds=time.perf_counter() - began)
            asked: Executor = executor if device == "cuda" else WithoutGraphs(executor, sizes.streams)
            assert asked.info.ragged_sizes, "no steps whose rows have draft lengths of their own"
            Study(asked, simulated, sizes, out).run()
            out.add("done", seconds=time.perf_counter() - began)
