"""From the raw records to the table and the verdict, as Markdown."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from benchmark.spec_toggle.records import (
    MODES,
    PLAIN,
    PLAIN_WITH_DRAFTER,
    SPEC,
    TOGGLE,
    BenchRun,
    RunRecord,
    same_texts,
)
from benchmark.spec_toggle.stats import Estimate, crossover, median_estimate, paired_ratio

SPEC_WIN_AT_ONE: Final = 1.4
TOGGLE_OF_BEST: Final = 0.97
DRAFTER_COST: Final = 1.02


@dataclass(frozen=True, slots=True)
class Row:
    """Everything the table says about one number of streams."""

    streams: int
    decode: dict[str, Estimate]  # by mode, tok/s while all streams decode
    total: dict[str, Estimate]  # by mode, tok/s with prefill
    spec_over_plain: Estimate  # two processes: without and with a drafter
    spec_over_plain_inside: Estimate  # one process, with a drafter
    toggle_over_best: Estimate  # one process: of `spec` and `plain with drafter`
    drafter_cost: Estimate  # time of a plain step with a drafter over one without
    accept_length: float | None  # where every step speculates
    toggle_mode: str  # of most of the toggle's steps


def rows_of(records: Sequence[RunRecord]) -> list[Row]:
    """Build one row for each stream count that every mode has been measured at."""
    counts = sorted({record.streams for record in records})
    groups = [_by_mode([record for record in records if record.streams == count]) for count in counts]
    whole = [(count, group) for count, group in zip(counts, groups, strict=True) if set(group) == set(MODES)]
    return [_row(count, group) for count, group in whole]


def _by_mode(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Group by mode; only the rounds that every mode finished (a run may have been interrupted).

    Nor those in which a mode's streams never all ran at once.
    """
    groups: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        if record.decode_rate > 0:
            groups.setdefault(record.mode, {})[record.round] = record
    shared = sorted(set.intersection(*(set(group) for group in groups.values()))) if groups else []
    return {mode: [group[index] for index in shared] for mode, group in groups.items() if shared}


def _row(streams: int, groups: dict[str, list[RunRecord]]) -> Row:
    rates = {mode: [record.decode_rate for record in groups[mode]] for mode in MODES}
    decode = {mode: median_estimate(rates[mode]) for mode in MODES}
    inside = paired_ratio(rates[SPEC], rates[PLAIN_WITH_DRAFTER])
    best = SPEC if inside.value >= 1.0 else PLAIN_WITH_DRAFTER
    spec_tokens = sum(record.spec_tokens for record in groups[SPEC])
    spec_steps = sum(record.spec_steps for record in groups[SPEC])
    toggle = groups[TOGGLE]
    speculated = sum(r.steps_spec for r in toggle) > sum(r.steps_plain for r in toggle)
    return Row(
        streams=streams,
        decode=decode,
        total={mode: median_estimate([record.total_rate for record in groups[mode]]) for mode in MODES},
        spec_over_plain=paired_ratio(rates[SPEC], rates[PLAIN]),
        spec_over_plain_inside=inside,
        toggle_over_best=paired_ratio(rates[TOGGLE], rates[best]),
        drafter_cost=paired_ratio(rates[PLAIN], rates[PLAIN_WITH_DRAFTER]),
        accept_length=spec_tokens / spec_steps if spec_steps else None,
        toggle_mode=SPEC if speculated else PLAIN,
    )


def markdown(run: BenchRun) -> str:
    """Return the report: what was run, the two tables, the verdict."""
    rows = rows_of(run.records)
    if not rows:
        return "Nothing to report: no stream count was measured in every mode.\n"
    header = "\n".join(f"- {name}: {value}" for name, value in run.header.items())
    parts = [header, _decode_table(rows), _total_table(rows), "\n".join(verdict(rows, run.records))]
    return "\n\n".join(parts) + "\n"


def _decode_table(rows: Sequence[Row]) -> str:
    lines = [
        "Decode rate, tok/s from the moment every stream has its first token until the first one finishes;"
        " medians over rounds with 95 % intervals:",
        "",
        "| streams | plain | spec | toggle (its mode) | plain with drafter | spec / plain "
        "| spec / plain with drafter | toggle / best | drafter's cost in plain steps | accept length |",
        "|-|-|-|-|-|-|-|-|-|-|",
    ]
    for row in rows:
        cells = [
            str(row.streams),
            _rate(row.decode[PLAIN]),
            _rate(row.decode[SPEC]),
            f"{_rate(row.decode[TOGGLE])} ({row.toggle_mode})",
            _rate(row.decode[PLAIN_WITH_DRAFTER]),
            _ratio(row.spec_over_plain),
            _ratio(row.spec_over_plain_inside),
            _ratio(row.toggle_over_best),
            _ratio(row.drafter_cost),
            "–" if row.accept_length is None else f"{row.accept_length:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _total_table(rows: Sequence[Row]) -> str:
    lines = [
        "Total rate, tok/s from sending the requests to the last token (ramp and tail included):",
        "",
        "| streams | plain | spec | toggle | plain with drafter |",
        "|-|-|-|-|-|",
    ]
    for row in rows:
        cells = [_rate(row.total[mode]) for mode in (PLAIN, SPEC, TOGGLE, PLAIN_WITH_DRAFTER)]
        lines.append(f"| {row.streams} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict(rows: Sequence[Row], records: Sequence[RunRecord]) -> list[str]:
    """Return one line for each question the benchmark is to answer."""
    first = rows[0]
    worst_toggle = min(rows, key=lambda row: row.toggle_over_best.value)
    worst_cost = max(rows, key=lambda row: row.drafter_cost.value)
    same, requests = same_texts(records)
    return [
        f"- Speculation at {first.streams} stream(s): {_ratio(first.spec_over_plain)} of plain"
        f" (wanted >= {SPEC_WIN_AT_ONE}): {_answer(first.spec_over_plain.value >= SPEC_WIN_AT_ONE)}",
        f"- Toggle against the better mode, worst point ({worst_toggle.streams} streams):"
        f" {_ratio(worst_toggle.toggle_over_best)} (wanted >= {TOGGLE_OF_BEST}):"
        f" {_answer(worst_toggle.toggle_over_best.value >= TOGGLE_OF_BEST)}",
        f"- Cost of a plain step in a server with a drafter, worst point ({worst_cost.streams} streams):"
        f" {_ratio(worst_cost.drafter_cost, 3)} (wanted <= {DRAFTER_COST}):"
        f" {_answer(worst_cost.drafter_cost.value <= DRAFTER_COST)}",
        f"- {crossover_sentence(rows)}",
        f"- Same output ids in every mode: {same} of {requests} requests",
    ]


def crossover_sentence(rows: Sequence[Row]) -> str:
    """Say from how many streams on plain decode is faster in the same process."""
    streams = [row.streams for row in rows]
    point = crossover(streams, [row.spec_over_plain_inside.value for row in rows])
    if point is None:
        return f"Crossover: speculation wins at every point measured (up to {streams[-1]} streams)"
    if point == streams[0]:
        return f"Crossover: plain wins from {streams[0]} stream(s) on"
    return f"Crossover: plain wins beyond about {point:.1f} streams"


def _answer(holds: bool) -> str:
    return "yes" if holds else "NO"


def _rate(estimate: Estimate) -> str:
    return f"{estimate.value:.1f} [{estimate.low:.1f}, {estimate.high:.1f}]"


def _ratio(estimate: Estimate, digits: int = 2) -> str:
    return f"{estimate.value:.{digits}f} [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
