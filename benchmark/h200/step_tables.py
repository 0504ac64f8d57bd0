"""Markdown tables of what ``step_times.py`` measured, beside the peer's figures and the bars to reach."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmark.h200 import peer

NOISE = 0.03  # between two machines of the kind
Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Best:
    """The better of the passes, and the worse one."""

    ms: float
    slower_ms: float
    line: Line  # of the better one

    def __str__(self) -> str:
        return f"{self.ms:.2f} ({self.slower_ms:.2f})"


def best(lines: Iterable[Line], value: str, **labels: object) -> Best | None:
    """The case with these labels; None if it was not run."""
    found = [x for x in lines if all(x.get(name) == wanted for name, wanted in labels.items())]
    if not found:
        return None
    ordered = sorted(found, key=lambda x: float(x[value]))
    return Best(1e3 * ordered[0][value], 1e3 * ordered[-1][value], ordered[0])


def tables(lines: Sequence[Line]) -> list[str]:
    """All tables, as lines of Markdown."""
    devices = sorted({str(line["device"]) for line in lines})
    return [
        f"Device: {', '.join(devices)}. Milliseconds: the better pass, the slower one in brackets.",
        "",
        *_decode_table(lines),
        "",
        *_prefill_table(lines),
        "",
        *_start_table(lines),
        "",
        *_bars(lines),
    ]


def _decode(lines: Sequence[Line], mode: str, drafter: bool, batch: int) -> Best | None:
    return best(lines, "wall_step_s", kind="decode", mode=mode, drafter=drafter, batch=batch)


def _decode_table(lines: Sequence[Line]) -> list[str]:
    rows = [
        "| batch | plain | peer / ours | tok/s | plain with drafter | with / without | spec | ours / peer"
        " | tok/s | alternating | / mean | tree | / chain |",
        "|" + "---|" * 13,
    ]
    for batch in sorted({x["batch"] for x in lines if x["kind"] == "decode"}):
        plain, warm = _decode(lines, "plain", False, batch), _decode(lines, "plain", True, batch)
        spec, turns = _decode(lines, "spec", True, batch), _decode(lines, "alternate", True, batch)
        tree = _decode(lines, "tree", True, batch)
        cells = [
            str(batch),
            _text(plain), _ratio(peer.PLAIN_STEP_MS.get(batch), plain), _rate(plain),
            _text(warm), _ratio(warm, plain),
            _text(spec), _ratio(spec, peer.SPEC_STEP_MS.get(batch)), _rate(spec),
            _text(turns), _ratio(turns, _mean(warm, spec)),
            _text(tree), _ratio(tree, spec),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _prefill_table(lines: Sequence[Line]) -> list[str]:
    rows = [
        "| prefill | without drafter | peer / ours | with drafter | peer / ours | with / without |",
        "|" + "---|" * 6,
    ]
    for batch, length in sorted({(x["batch"], x["input_len"]) for x in lines if x["kind"] == "prefill"}):
        without, with_drafter = (_prefill(lines, drafter, batch, length) for drafter in (False, True))
        plain_peer, spec_peer = _prefill_peer(batch, length)
        cells = [
            f"{batch} x {length}",
            _text(without), _ratio(plain_peer, without),
            _text(with_drafter), _ratio(spec_peer, with_drafter), _ratio(_cost(lines, batch, length), 1.0),
        ]  # fmt: skip
        rows.append("| " + " | ".join(cells) + " |")
    return rows


def _cost(lines: Sequence[Line], batch: int, length: int) -> float | None:
    """With a drafter / without: the median over passes, of which both were taken within a second."""
    seconds: dict[tuple[int, bool], float] = {
        (x["number"], x["drafter"]): x["wall_s"]
        for x in lines
        if x["kind"] == "prefill" and (x["batch"], x["input_len"]) == (batch, length)
    }
    numbers = [number for number, drafter in seconds if drafter and (number, False) in seconds]
    return median(seconds[n, True] / seconds[n, False] for n in numbers) if numbers else None


def _prefill(lines: Sequence[Line], drafter: bool, batch: int, length: int) -> Best | None:
    return best(lines, "wall_s", kind="prefill", drafter=drafter, batch=batch, input_len=length)


def _prefill_peer(batch: int, length: int) -> tuple[float | None, float | None]:
    if length != peer.PREFILL_LEN:
        return None, None
    return peer.PLAIN_PREFILL_MS.get(batch), peer.SPEC_PREFILL_MS.get(batch)


def _start_table(lines: Sequence[Line]) -> list[str]:
    rows = ["| start | seconds, all | graphs | capture, s | GB |", "|" + "---|" * 5]
    for line in lines:
        if line["kind"] != "start":
            continue
        sets = line["info"].get("graphs", [])
        named = ", ".join(f"draft_len {g['draft_len']}: {len(g['sizes'])}" for g in sets) or "none"
        seconds, size = graph_cost(line)
        rows.append(
            f"| {line['note']} | {line['seconds']:.1f} | {named} | {seconds:.1f} | {size / 1e9:.2f} |"
        )
    return rows


def graph_cost(start: Line) -> tuple[float, float]:
    """Seconds and bytes of all graphs captured at a start."""
    sets = start["info"].get("graphs", [])
    return sum(g["seconds"] for g in sets), sum(g["bytes"] for g in sets)


@dataclass(frozen=True, slots=True)
class Bar:
    what: str
    value: float
    limit: float
    at_least: bool  # else: at most

    @property
    def verdict(self) -> str:
        miss = self.limit / self.value - 1 if self.at_least else self.value / self.limit - 1
        if miss <= 0:
            return "reached"
        return "within 3 %" if miss <= NOISE else "MISSED"


def bars(lines: Sequence[Line]) -> list[Bar]:
    """Every bar whose case was run. Step times by the wall, of the better pass."""
    found: list[Bar] = []

    def bar(what: str, value: float | None, limit: float, at_least: bool = False) -> None:
        if value is not None:
            found.append(Bar(what, value, limit, at_least))

    for batch in sorted({x["batch"] for x in lines if x["kind"] == "decode"}):
        plain, warm = _decode(lines, "plain", False, batch), _decode(lines, "plain", True, batch)
        spec, turns = _decode(lines, "spec", True, batch), _decode(lines, "alternate", True, batch)
        if batch == 1:
            rate = None if plain is None else float(plain.line["tokens_per_s"])
            bar("plain, batch 1, tok/s", rate, 232, at_least=True)
            bar("EAGLE-3, batch 1, ms", _ms(spec), 5.3)
        else:
            faster = _quotient(peer.PLAIN_STEP_MS.get(batch), plain)
            bar(f"plain, batch {batch}, peer / ours", faster, 1.05, at_least=True)
            slower = _quotient(spec, peer.SPEC_STEP_MS.get(batch))
            bar(f"EAGLE-3, batch {batch}, ours / peer", slower, 0.87)
        bar(f"plain with / without drafter, batch {batch}", _quotient(warm, plain), 1.015)
        bar(f"alternating / mean, batch {batch}", _quotient(turns, _mean(warm, spec)), 1.01)
    found += _prefill_bars(lines)
    for line in lines:
        if line["kind"] == "start" and line["note"] == "startup" and line["info"].get("graphs"):
            # More than the bar is about: the weights' making is in it too.
            found.append(Bar("start with both sets, all of it, s", line["seconds"], 60, at_least=False))
            found.append(Bar("graphs, GB", graph_cost(line)[1] / 1e9, 3, at_least=False))
    return found


def _prefill_bars(lines: Sequence[Line]) -> list[Bar]:
    found = []
    for batch, length in sorted({(x["batch"], x["input_len"]) for x in lines if x["kind"] == "prefill"}):
        without, with_drafter = (_prefill(lines, drafter, batch, length) for drafter in (False, True))
        name = f"prefill {batch} x {length}"
        ratios = zip(
            ("", " with drafter"), _prefill_peer(batch, length), (without, with_drafter), strict=True
        )
        for extra, theirs, ours in ratios:
            if (value := _quotient(theirs, ours)) is not None:
                found.append(Bar(f"{name}{extra}, peer / ours", value, 0.95, at_least=True))
        if (value := _cost(lines, batch, length)) is not None:
            found.append(Bar(f"{name}, with / without drafter", value, 1.05, at_least=False))
    return found


def _bars(lines: Sequence[Line]) -> list[str]:
    rows = ["| bar | measured | must be | |", "|---|---|---|---|"]
    for bar in bars(lines):
        sign = "≥" if bar.at_least else "≤"
        rows.append(f"| {bar.what} | {bar.value:.3f} | {sign} {bar.limit:g} | {bar.verdict} |")
    return rows


def _ms(value: Best | float | None) -> float | None:
    return value.ms if isinstance(value, Best) else value


def _quotient(above: Best | float | None, below: Best | float | None) -> float | None:
    top, bottom = _ms(above), _ms(below)
    return None if top is None or not bottom else top / bottom


def _mean(one: Best | None, other: Best | None) -> float | None:
    return None if one is None or other is None else (one.ms + other.ms) / 2


def _text(value: Best | None) -> str:
    return "" if value is None else str(value)


def _ratio(above: Best | float | None, below: Best | float | None) -> str:
    value = _quotient(above, below)
    return "" if value is None else f"{value:.3f}"


def _rate(value: Best | None) -> str:
    return "" if value is None else f"{value.line['tokens_per_s']:.0f}"
