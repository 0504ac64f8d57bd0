"""Markdown tables of what ``simulate.py`` wrote, and how it is written."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import Any

Line = dict[str, Any]


def rounded(line: Line) -> Line:
    """As it is kept in a file."""
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in line.items()}


def markdown(lines: Sequence[Line]) -> list[str]:
    """Regret by policy and trace; requests' latency against ours; draft lengths that ours chose."""
    traces = list(dict.fromkeys(line["trace"] for line in lines))
    names = list(dict.fromkeys(line["policy"] for line in lines))
    values = {
        (name, trace): [x["regret"] for x in lines if (x["policy"], x["trace"]) == (name, trace)]
        for name in names
        for trace in traces
    }
    rows = [_row(name, [mean(values[name, t]) for t in traces]) for name in _shown(names)]
    thresholds = [n for n in names if n.startswith("threshold ")]
    if thresholds:
        overall = min(thresholds, key=lambda n: mean(mean(values[n, t]) for t in traces))
        name = f"best one threshold ({overall.split()[1]})"
        rows.append(_row(name, [mean(values[overall, t]) for t in traces]))
        best = [min(mean(values[n, t]) for n in thresholds) for t in traces]
        rows.append(_row("best threshold of each trace", best))
    return [
        "Regret, % (mean over seeds):",
        "",
        f"| policy | {' | '.join(traces)} | mean | worst |",
        "|---|" + "---|" * (len(traces) + 2),
        *rows,
        "",
        "Mean latency of a request, relative to `auto`:",
        "",
        *_latencies(lines, traces, names),
    ]


def _shown(names: Sequence[str]) -> list[str]:
    return [name for name in names if not name.startswith("threshold ")]


def _row(name: str, regrets: Sequence[float]) -> str:
    cells = [*regrets, mean(regrets), max(regrets)]
    return f"| {name} | " + " | ".join(f"{100 * x:.2f}" for x in cells) + " |"


def _latencies(lines: Sequence[Line], traces: Sequence[str], names: Sequence[str]) -> list[str]:
    def latency(name: str, trace: str) -> float:
        return mean(float(x["mean_latency_s"]) for x in lines if (x["policy"], x["trace"]) == (name, trace))

    if "auto" not in names:
        return []
    ours = {trace: latency("auto", trace) for trace in traces}
    rows = [
        f"| {name} | " + " | ".join(f"{latency(name, t) / ours[t]:.3f}" for t in traces) + " |"
        for name in _shown(names)
    ]
    header = f"| policy | {' | '.join(traces)} |"
    seconds = "| auto, seconds | " + " | ".join(f"{ours[t]:.2f}" for t in traces) + " |"
    return [header, "|---|" + "---|" * len(traces), *rows, seconds]
