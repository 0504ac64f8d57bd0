"""What a replay comes to: figures of each second, of the whole, and of the steps around a switch. Pure."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from benchmark.spec_toggle.client import StreamTrace
from benchmark.spec_toggle.latency import latency_of, most_at_once, percentile, token_gaps
from benchmark.spec_toggle.records import PLAIN, SPEC
from benchmark.spec_toggle.replay_run import Replay, ServerState

STEPS_AFTER: Final = 20
"""So many steps after a switch belong to it."""
FEWEST_GAPS: Final = 50
"""Of fewer waits no 99th percentile is told."""


@dataclass(frozen=True, slots=True)
class Second:
    """One second of a replay."""

    column: str
    round: int
    second: int
    running: int  # requests between their first and their last token, in its middle
    waiting: int  # sent, and without a token yet
    tokens: int
    itl_p50: float  # seconds
    itl_p99: float
    plain_steps: int | None  # None: the server doesn't tell
    spec_steps: int | None
    switches: int | None
    by_drafts: dict[str, int]  # drafts -> steps, where they are counted


@dataclass(frozen=True, slots=True)
class Whole:
    """One replay, all in all."""

    column: str
    mode: str
    round: int
    requests: int
    failed: int
    first_error: str
    tokens: int
    seconds: float  # from the first arrival to the last token
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    e2e_mean: float
    most_running: int
    plain_steps: int | None
    spec_steps: int | None
    switches: int | None
    late_s: float
    by_drafts: dict[str, int]
    probes: int  # steps that `auto` ran to keep its acceptance fresh
    near_p99: float | None  # waits between a stream's events within 20 steps of a switch
    steady_p99: float | None  # the slower fixed mode's, at as many running requests
    near_count: int

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Steps:
    """Decode steps between two moments; None where the server doesn't tell."""

    plain: int | None
    spec: int | None
    switches: int | None
    decisions: dict[str, int]  # "drafts:reason" -> steps

    def by_drafts(self) -> dict[str, int]:
        """Return the steps of each number of drafts; nothing where the server doesn't count them.

        Plain ones that had no choice (they prefilled, too) count as well.
        """
        found = {"0": self.plain} if self.plain and self.decisions else {}
        for name, count in sorted(self.decisions.items()):
            drafts = name.partition(":")[0]
            if count and drafts != "0":
                found[drafts] = found.get(drafts, 0) + count
        return found

    def probes(self) -> int:
        """Return the steps that were run for the estimates' sake."""
        return sum(count for name, count in self.decisions.items() if name.partition(":")[2] == "probe")


@dataclass(frozen=True, slots=True)
class Gap:
    """A wait between two events of one stream during which no other request began."""

    begin: float
    seconds: float
    running: int


def seconds_of(column: str, index: int, replay: Replay) -> list[Second]:
    """Return the figures of each second until the last token."""
    length = math.floor(max(trace.times[-1] for trace in replay.traces)) + 1
    tokens = [0] * length
    waits: list[list[float]] = [[] for _ in range(length)]
    for trace in replay.traces:
        gaps = iter(token_gaps(trace))
        before = 0
        for position, (moment, count) in enumerate(zip(trace.times, trace.counts, strict=True)):
            tokens[int(moment)] += count - before
            if position:
                waits[int(moment)] += [next(gaps) for _ in range(count - before)]
            before = count
    found = []
    for second in range(length):
        running, waiting = _load_at(replay.traces, second + 0.5)
        steps = steps_between(replay.states, second, second + 1)
        found.append(
            Second(
                column, index, second, running, waiting, tokens[second],
                percentile(waits[second], 50), percentile(waits[second], 99),
                steps.plain, steps.spec, steps.switches, steps.by_drafts(),
            )
        )  # fmt: skip
    return found


def whole_of(column: str, mode: str, index: int, replay: Replay, fixed: Mapping[str, Replay]) -> Whole:
    """Sum a replay up; ``fixed`` has the replays of the same trace in plain and in speculative steps."""
    latency = latency_of(replay.traces)
    near = near_gaps(replay)
    steady = steady_p99(near, fixed)
    steps = steps_between(replay.states, -math.inf, math.inf)
    return Whole(
        column=column,
        mode=mode,
        round=index,
        requests=len(replay.traces),
        failed=len(replay.errors),
        first_error=replay.errors[0] if replay.errors else "",
        tokens=sum(trace.counts[-1] for trace in replay.traces),
        seconds=max(trace.times[-1] for trace in replay.traces),
        ttft_p50=latency.ttft_p50,
        ttft_p99=latency.ttft_p99,
        itl_p50=latency.itl_p50,
        itl_p99=latency.itl_p99,
        e2e_mean=sum(trace.times[-1] - trace.started for trace in replay.traces) / len(replay.traces),
        most_running=most_at_once(replay.traces),
        plain_steps=steps.plain,
        spec_steps=steps.spec,
        switches=steps.switches,
        by_drafts=steps.by_drafts(),
        probes=steps.probes(),
        late_s=replay.late_s,
        near_p99=percentile([gap.seconds for gap in near], 99) if steady is not None else None,
        steady_p99=steady,
        near_count=len(near),
    )


def near_gaps(replay: Replay) -> list[Gap]:
    """Return the waits within 20 steps of a switch, as far as samples of the server's state tell its time."""
    windows = switch_windows(replay)
    begins = [begin for begin, _ in windows]
    found = []
    for gap in clean_gaps(replay.traces):
        at = bisect_right(begins, gap.begin) - 1
        if at >= 0 and gap.begin <= windows[at][1]:
            found.append(gap)
    return found


def switch_windows(replay: Replay) -> list[tuple[float, float]]:
    """Return (begin, end) in which switches and the 20 steps after them lie, ascending and apart."""
    windows: list[tuple[float, float]] = []
    for before, after in zip(replay.states, replay.states[1:], strict=False):
        steps = after.plain_steps + after.spec_steps - before.plain_steps - before.spec_steps
        if after.switches > before.switches and steps:
            step_s = (after.second - before.second) / steps
            end = after.second + STEPS_AFTER * step_s
            if windows and before.second <= windows[-1][1]:
                windows[-1] = (windows[-1][0], max(end, windows[-1][1]))
            else:
                windows.append((before.second, end))
    return windows


def clean_gaps(traces: Sequence[StreamTrace]) -> list[Gap]:
    """Return all waits between events of a stream in which no request got its first token.

    A prefill lengthens the steps around it in every mode.
    """
    begins = sorted(trace.times[0] for trace in traces)
    ends = sorted(trace.times[-1] for trace in traces)
    found = []
    for trace in traces:
        for begin, end in zip(trace.times, trace.times[1:], strict=False):
            started = bisect_right(begins, begin)
            if bisect_right(begins, end) == started:
                found.append(Gap(begin, end - begin, started - bisect_left(ends, begin)))
    return found


def steady_p99(near: Sequence[Gap], fixed: Mapping[str, Replay]) -> float | None:
    """Return the slower fixed mode's 99th percentile at as many running requests.

    None where it can't be told: too few waits, or no replay of the trace in each fixed mode.
    """
    if len(near) < FEWEST_GAPS or not {PLAIN, SPEC} <= set(fixed):
        return None
    low = min(gap.running for gap in near)
    high = max(gap.running for gap in near)
    found = []
    for mode in (PLAIN, SPEC):
        waits = [gap.seconds for gap in clean_gaps(fixed[mode].traces) if low <= gap.running <= high]
        if len(waits) < FEWEST_GAPS:
            return None
        found.append(percentile(waits, 99))
    return max(found)


def _load_at(traces: Sequence[StreamTrace], moment: float) -> tuple[int, int]:
    """Return (running, waiting) requests."""
    running = sum(trace.times[0] <= moment <= trace.times[-1] for trace in traces)
    return running, sum(trace.started <= moment < trace.times[0] for trace in traces)


def steps_between(states: Sequence[ServerState], begin: float, end: float) -> Steps:
    """Return the steps between the last samples before two moments."""
    if not states:
        return Steps(None, None, None, {})
    moments = [state.second for state in states]
    before = states[max(0, bisect_right(moments, begin) - 1)]
    after = states[max(0, bisect_right(moments, end) - 1)]
    return Steps(
        after.plain_steps - before.plain_steps,
        after.spec_steps - before.spec_steps,
        after.switches - before.switches,
        {name: count - before.decisions.get(name, 0) for name, count in after.decisions.items()},
    )
