"""Markdown tables of what ``http_rates.py`` measured, and what must not have happened meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmark.h200.step_tables import Bar, Line

LEAST_RATIO = 0.95
HOST_US = 500.0  # of one step, at 128 rows: to go for


@dataclass(frozen=True, slots=True)
class Rate:
    """The better of the passes, and the slower one."""

    tokens_per_s: float
    slower: float
    line: Line  # of the better one

    def __str__(self) -> str:
        return f"{self.tokens_per_s:.0f} ({self.slower:.0f})"


def rate(lines: Sequence[Line], kind: str, mode: str, batch: int) -> Rate | None:
    """None if there was no such run. Of static batches those beside a drafter count, as over HTTP."""
    found = [
        x for x in lines
        if (x["kind"], x.get("mode"), x.get("batch")) == (kind, mode, batch) and x.get("drafter", True)
    ]  # fmt: skip
    if not found:
        return None
    ordered = sorted(found, key=lambda x: float(x["tokens_per_s"]))
    return Rate(ordered[-1]["tokens_per_s"], ordered[0]["tokens_per_s"], ordered[-1])


def tables(lines: Sequence[Line]) -> list[str]:
    devices = sorted({str(line["device"]) for line in lines})
    return [
        f"Device: {', '.join(devices)}. Tokens per second: the better pass, the slower one in brackets.",
        "",
        *_rate_table(lines),
        "",
        *_host_table(lines),
        "",
        *_bars(lines),
    ]


def cases(lines: Sequence[Line]) -> list[tuple[str, int]]:
    found = {(str(x["mode"]), int(x["batch"])) for x in lines if x["kind"] == "http"}
    return sorted(found, key=lambda case: (case[0] != "plain", case[1]))


def _rate_table(lines: Sequence[Line]) -> list[str]:
    rows = [
        "| rows | mode | HTTP tok/s | bench tok/s | HTTP / bench | tokens a row and step, HTTP | bench"
        " | step ms, HTTP | bench | first token of all, s |",
        "|" + "---|" * 10,
    ]
    for mode, batch in cases(lines):
        http, bench = rate(lines, "http", mode, batch), rate(lines, "decode", mode, batch)
        assert http is not None
        cells = [
            str(batch), mode, str(http), _text(bench), _quotient(http, bench),
            *_figures("tokens_per_row", 1, 3, http, bench), *_figures("wall_step_s", 1e3, 2, http, bench),
            f"{http.line['first_token_s']:.2f}",
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _host_table(lines: Sequence[Line]) -> list[str]:
    """The host's time of a step: from a result to the next launch, and that launch in the executor."""
    processes = ("http", "scheduler", "detokenizer", "client")
    rows = [
        "| rows | mode | schedule µs | launch µs | step µs | eager steps | "
        + " | ".join(f"{name}: CPUs" for name in processes)
        + " |",
        "|" + "---|" * 10,
    ]
    for mode, batch in cases(lines):
        found = rate(lines, "http", mode, batch)
        assert found is not None
        line = found.line
        cells = [
            str(batch), mode, _micros(line["schedule_us"]), _micros(line["launch_us"]),
            _micros(1e6 * line["wall_step_s"]), str(line["eager_steps"]),
            *(f"{line['cpu_share'][name]:.2f}" for name in processes),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def bars(lines: Sequence[Line]) -> list[Bar]:
    found = []
    for mode, batch in cases(lines):
        http, bench = rate(lines, "http", mode, batch), rate(lines, "decode", mode, batch)
        assert http is not None
        if bench is not None:
            ratio = http.tokens_per_s / bench.tokens_per_s
            found.append(Bar(f"HTTP / bench, {mode}, {batch} rows", ratio, LEAST_RATIO, at_least=True))
        host, step = _host_us(http.line), 1e6 * http.line["wall_step_s"]
        if host is not None and batch >= 16:
            found.append(Bar(f"host µs / step µs, {mode}, {batch} rows", host / step, 1.0, at_least=False))
        if host is not None and batch == 128:
            found.append(Bar(f"host µs a step, {mode}, {batch} rows", host, HOST_US, at_least=False))
    return found


def _host_us(line: Line) -> float | None:
    """Nothing on a CPU, where the launch is the step itself."""
    return None if line["launch_us"] is None else float(line["schedule_us"] + line["launch_us"])


def _bars(lines: Sequence[Line]) -> list[str]:
    rows = ["| bar | measured | must be | |", "|---|---|---|---|"]
    for bar in bars(lines):
        sign = "≥" if bar.at_least else "≤"
        rows.append(f"| {bar.what} | {bar.value:.3f} | {sign} {bar.limit:g} | {bar.verdict} |")
    return rows


def eager_steps(lines: Sequence[Line]) -> list[str]:
    """Of all runs so far, so the last one tells."""
    counts = [line["eager_steps"] for line in lines if line["kind"] == "http"]
    return [f"{counts[-1]} decode steps over HTTP ran without a CUDA graph"] if counts and counts[-1] else []


def wrong_modes(lines: Sequence[Line]) -> list[str]:
    """Runs with steps of a mode that they should not have, or with retracted requests."""
    found = []
    for line in lines:
        if line["kind"] != "http":
            continue
        others = sum(count for mode, count in line["steps"].items() if mode != line["mode"])
        name = f"{line['mode']}, {line['batch']} rows, pass {line['number']}"
        if others:
            found.append(f"{name}: {others} steps of the other mode")
        if line["retractions"]:
            found.append(f"{name}: {line['retractions']} requests were retracted")
    return found


def _text(value: Rate | None) -> str:
    return "" if value is None else str(value)


def _figures(name: str, scale: float, digits: int, *rates: Rate | None) -> list[str]:
    return ["" if x is None else f"{scale * x.line[name]:.{digits}f}" for x in rates]


def _quotient(above: Rate, below: Rate | None) -> str:
    return "" if below is None else f"{above.tokens_per_s / below.tokens_per_s:.3f}"


def _micros(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"
