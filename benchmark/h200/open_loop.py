"""Arrivals in time for the scheduler of `in_process.py`: the threshold's edge, and what bursts need too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmark.h200.auto_points import AUTO, turns
from benchmark.h200.executors import Records
from benchmark.h200.in_process import InProcess, Mode, StepRecord
from benchmark.traces import POISSON, Arrival, TraceOptions, arrivals

PromptOf = Callable[[Arrival], Sequence[int]]
PLAIN, ALWAYS = Mode("plain", 0), Mode("always", None)


def modes_of(threshold: int) -> list[Mode]:
    return [PLAIN, ALWAYS, Mode("threshold", threshold), AUTO]


def run_trace(
    engine: InProcess,
    trace: Sequence[Arrival],
    prompt_of: PromptOf,
    until_s: float | None = None,  # None: until all is answered
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Requests come when the clock says so, whatever has been answered."""
    clock = engine.clock
    began, ahead = clock.now(), 0
    while ahead < len(trace) or engine.scheduler.has_work:
        now = clock.now() - began
        if until_s is not None and now >= until_s:
            return
        while ahead < len(trace) and trace[ahead].second <= now:
            engine.submit(prompt_of(trace[ahead]), trace[ahead].output_len)
            ahead += 1
        if engine.scheduler.has_work:
            engine.step()
            after_step()
        else:
            clock.sleep(max(1e-4, trace[ahead].second - now))  # rounding must not make it nothing


@dataclass(frozen=True, slots=True)
class EdgeSizes:
    threshold: int
    context: int  # of the rows that stay; 0: prompts of their own
    seconds: float
    rounds: int
    output_len: int  # of the short requests
    prompt_len: int


class Edge:
    """All rows but one stay; short requests come and go, so that the rows hover about the threshold.

    Prompts of the short ones are computed, between the decode steps.
    """

    def __init__(
        self, engine: InProcess, sizes: EdgeSizes, staying: list[list[int]], prompt_of: PromptOf, out: Records
    ) -> None:
        """``staying``: prompts of as many rows as the threshold allows, less one."""
        assert len(staying) == sizes.threshold - 1
        self._engine, self._sizes, self._out = engine, sizes, out
        self._staying, self._prompt_of = staying, prompt_of
        self._names: dict[str, list[int]] = {}  # prompts of the rows that stay

    def run(self, skip_prefill: bool, labels: dict[str, object]) -> None:
        modes = modes_of(self._sizes.threshold)
        trace = self._trace(skip_prefill)
        for number in range(self._sizes.rounds):
            for mode in turns(modes, number):
                records = self._run(mode, trace, skip_prefill)
                self._out.add("edge", **labels, mode=mode.name, round=str(number), **edge_line(records))

    def _trace(self, skip_prefill: bool) -> list[Arrival]:
        """As many short requests as keep about one running while all steps are plain."""
        sizes = self._sizes
        self._begin(skip_prefill)
        self._engine.set_mode(PLAIN)
        for _ in range(8):
            self._engine.step()
        times = sorted(r.gap_s for r in self._engine.records if r.kind == "decode")
        self._end()
        rate = 1.2 / (sizes.output_len * times[len(times) // 2])
        options = TraceOptions(
            duration_s=sizes.seconds,
            rate=rate,
            output_len=sizes.output_len,
            prompt_len=sizes.prompt_len,
            spread=0.5,
        )
        return arrivals(POISSON, 0, options)

    def _run(self, mode: Mode, trace: Sequence[Arrival], skip_prefill: bool) -> list[StepRecord]:
        self._begin(skip_prefill)
        self._engine.set_mode(mode)
        self._engine.executor.label = mode.name
        run_trace(self._engine, trace, self._prompt_of, self._sizes.seconds, self._replace)
        self._engine.executor.label = ""
        return [record for record in self._end() if record.label == mode.name]

    def _begin(self, skip_prefill: bool) -> None:
        engine, longest = self._engine, self._engine.executor.info.context_len
        names = engine.begin(self._staying, longest, skip_prefill)
        self._names = dict(zip(names, self._staying, strict=True))

    def _replace(self) -> None:
        """Who stays but has come to the end of its context begins again."""
        longest = self._engine.executor.info.context_len
        for rid in self._engine.finished:
            prompt = self._names.pop(rid, None)
            if prompt is not None:
                self._names[self._engine.submit(prompt, longest)] = prompt
        self._engine.finished.clear()

    def _end(self) -> list[StepRecord]:
        self._engine.end()
        self._engine.finished.clear()
        records = list(self._engine.records)
        self._engine.records.clear()
        return records


def edge_line(records: Sequence[StepRecord]) -> dict[str, object]:
    """What one run was: time, tokens, and the rows that its steps had."""
    decode = [record for record in records if record.num_rows]
    accepted: dict[str, list[int]] = {}
    for record in decode:
        sums = accepted.setdefault(str(record.draft_len), [0] * len(record.accepted))
        sums[:] = [a + b for a, b in zip(sums, record.accepted, strict=True)]
    lens = [record.draft_len for record in decode]
    return {
        "seconds": sum(record.gap_s for record in records),
        "tokens": sum(record.num_tokens for record in records),
        "num_first": sum(record.num_first for record in records),
        "prefill_steps": sum(record.num_rows == 0 for record in records),
        "accepted": dict(sorted(accepted.items())),
        "rows": {str(rows): n for rows, n in sorted(Counter(r.num_rows for r in decode).items())},
        "steps": {str(k): n for k, n in sorted(Counter(lens).items())},
        "switches": sum(a != b for a, b in zip(lens, lens[1:], strict=False)),
        "eager_steps": sum(record.used_graph is False for record in records),
    }
