"""The file of a trace's replays, and its table as Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.spec_toggle.records import append_record, read_lines, write_header
from benchmark.spec_toggle.replay_figures import Second, Whole
from benchmark.spec_toggle.stats import Estimate, few_estimate, few_ratio


def write_replays(
    path: Path, header: Mapping[str, Any], seconds: Sequence[Second], wholes: Sequence[Whole]
) -> None:
    """Write everything about the replays."""
    write_header(path, dict(header))
    for record in (*wholes, *seconds):
        append_record(path, record)


def read_replays(path: Path) -> tuple[dict[str, Any], list[Second], list[Whole]]:
    """Read what `write_replays` wrote.

    Raises:
        ValueError: it is no such file.
    """
    header, lines = read_lines(path)
    wholes = [Whole(**line) for line in lines if "e2e_mean" in line]
    return header, [Second(**line) for line in lines if "e2e_mean" not in line], wholes


def markdown(header: Mapping[str, Any], wholes: Sequence[Whole]) -> str:
    """Return the report: a row a column, its tokens per second over each other column's."""
    columns = list(dict.fromkeys(whole.column for whole in wholes))
    runs = {name: [whole for whole in wholes if whole.column == name] for name in columns}
    over = " | ".join(f"/ {name}" for name in columns)
    head = ["TTFT p50 / p99, s", "ITL p50 / p99, ms", "request, s", "most running"]
    head += ["steps by drafts", "probes", "switches", "p99 near a switch / steady"]
    lines = [
        *(f"- {name}: {value}" for name, value in header.items()),
        "",
        f"| | tok/s | {over} | {' | '.join(head)} |",
        "|-|-|" + "-|" * (len(columns) + len(head)),
    ]
    for name in columns:
        ratios = ["" if other == name else _ratio(_over(runs[name], runs[other])) for other in columns]
        cells = [name, _rate(runs[name]), *ratios, *_cells(runs[name])]
        lines.append(f"| {' | '.join(cells)} |")
    failed = sum(whole.failed for whole in wholes)
    late = max(whole.late_s for whole in wholes)
    lines += [
        "",
        f"- Requests that failed: {failed}{_first_error(wholes)}; latest sending: {1e3 * late:.0f} ms",
    ]
    return "\n".join(lines) + "\n"


def _over(tops: Sequence[Whole], bottoms: Sequence[Whole]) -> Estimate:
    beneath = {whole.round: whole.rate for whole in bottoms}
    pairs = [(whole.rate, beneath[whole.round]) for whole in tops if whole.round in beneath]
    return few_ratio([top for top, _ in pairs], [bottom for _, bottom in pairs])


def _cells(runs: Sequence[Whole]) -> list[str]:
    return [
        f"{_mean([r.ttft_p50 for r in runs]):.3g} / {_mean([r.ttft_p99 for r in runs]):.3g}",
        f"{1e3 * _mean([r.itl_p50 for r in runs]):.1f} / {1e3 * _mean([r.itl_p99 for r in runs]):.1f}",
        f"{_mean([r.e2e_mean for r in runs]):.3g}",
        str(max(r.most_running for r in runs)),
        _steps(runs),
        str(sum(r.probes for r in runs)),
        _sum([r.switches for r in runs]),
        _near(runs),
    ]


def _steps(runs: Sequence[Whole]) -> str:
    """Return the steps of each number of drafts; plain and speculative ones where only these are told."""
    drafts = sorted({int(name) for run in runs for name in run.by_drafts})
    if drafts:
        return ", ".join(f"{k}: {sum(run.by_drafts.get(str(k), 0) for run in runs)}" for k in drafts)
    plain, spec = _sum([run.plain_steps for run in runs]), _sum([run.spec_steps for run in runs])
    return f"plain {plain}, speculative {spec}"


def _near(runs: Sequence[Whole]) -> str:
    told = [r.near_p99 / r.steady_p99 for r in runs if r.near_p99 is not None and r.steady_p99]
    if not told:
        return "not told"
    return f"{_mean(told):.2f} (of {sum(r.near_count for r in runs)} waits)"


def _first_error(wholes: Sequence[Whole]) -> str:
    errors = [whole.first_error for whole in wholes if whole.first_error]
    return f" (the first: {errors[0]})" if errors else ""


def _sum(values: Sequence[int | None]) -> str:
    known = [value for value in values if value is not None]
    return str(sum(known)) if known else "–"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _rate(runs: Sequence[Whole]) -> str:
    estimate = few_estimate([whole.rate for whole in runs])
    return f"{estimate.value:.1f}{_interval(estimate, 1)}"


def _ratio(estimate: Estimate) -> str:
    return f"{estimate.value:.3f}{_interval(estimate, 3)}"


def _interval(estimate: Estimate, digits: int) -> str:
    if estimate.low == 0.0:  # a single run
        return ""
    return f" [{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"
