"""The study's tables and sentences, as Markdown."""

from collections.abc import Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmark.spec_toggle.records import SPEC
from benchmark.spec_toggle.stats import Estimate
from benchmark.spec_toggle.study_points import (
    Crossing,
    Point,
    accept_lengths,
    base_column,
    crossings,
    over_better,
    points_of,
    same_texts,
)
from benchmark.spec_toggle.study_records import FIXED, StudyRecord


def markdown(header: Mapping[str, Any], records: Sequence[StudyRecord]) -> str:
    """Return the whole report."""
    if not records:
        return "Nothing to report: no run was finished.\n"
    base = base_column(records)
    points = points_of(records, base)
    parts = ["\n".join(f"- {name}: {value}" for name, value in header.items())]
    parts += [short_table(points, base), "\n".join(sentences(points, records, base))]
    for domain in dict.fromkeys(point.domain for point in points):
        parts.append(domain_table([point for point in points if point.domain == domain], base))
    return "\n\n".join(parts) + "\n"


def short_table(points: Sequence[Point], base: str) -> str:
    """Return tok/s in total of every column; in bold where it beats the base."""
    counts = sorted({point.streams for point in points if point.domain != FIXED})
    lines = [
        "Tokens per second of all streams together, from sending the requests to the last token"
        f" (**bold**: more than {base}):",
        "",
        f"| prompts | | {' | '.join(f'C{count}' for count in counts)} |",
        "|-|-|" + "-|" * len(counts),
    ]
    for domain, column in dict.fromkeys((p.domain, p.column) for p in points if p.domain != FIXED):
        row = {p.streams: p for p in points if (p.domain, p.column) == (domain, column)}
        cells = [_short(row[count]) if count in row else "" for count in counts]
        lines.append(f"| {domain} | {column} | {' | '.join(cells)} |")
    return "\n".join(lines)


def domain_table(points: Sequence[Point], base: str) -> str:
    """Return everything about one domain: a row for each number of streams and column."""
    domain, runs = points[0].domain, sorted({point.runs for point in points})
    times = str(runs[0]) if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    title = "One stream, one fixed prompt" if domain == FIXED else f"Prompts: {domain}"
    lines = [
        f"**{title}** ({times} runs a row; 95 % intervals of at least 3 in brackets; deltas against {base},"
        " round by round)",
        "",
        "| streams | | tok/s total | Δ | tok/s decode | Δ | tok/s a request | TTFT p50 / p99, ms "
        "| ITL p50, ms | ITL p99, ms | accept length | drafts | speculative steps | at once |",
        "|-|-|-|-|-|-|-|-|-|-|-|-|-|-|",
    ]
    lines += [f"| {' | '.join(_cells(point))} |" for point in points]
    return "\n".join(lines)


def sentences(points: Sequence[Point], records: Sequence[StudyRecord], base: str) -> list[str]:
    """Return one line for each question that the study is to answer."""
    lines = []
    for rate, is_decode in (("total", False), ("decode", True)):
        for crossing in crossings(points, decode=is_decode):
            if _mode(points, crossing.column) == SPEC:
                lines.append(
                    f"- Crossover by the {rate} rate, {crossing.domain}: {_crossing(crossing, base)}"
                )
    lengths = [f"{domain} {length:.2f}" for domain, (length, _) in accept_lengths(records).items()]
    if lengths:
        lines.append(f"- Tokens a speculative step: {', '.join(lengths)}")
    chosen = over_better(records)
    for column in dict.fromkeys(row[0] for row in chosen):
        ratios = [(domain, streams, ratio) for name, domain, streams, ratio in chosen if name == column]
        worst = min(ratios, key=lambda row: row[2].value)
        mean = geometric_mean([ratio.value for _, _, ratio in ratios])
        lines.append(
            f"- {column} against the better fixed mode, total rate: {mean:.3f} on average over"
            f" {len(ratios)} points, at worst {_ratio(worst[2])} ({worst[0]}, {worst[1]} streams)"
        )
    most = max(point.streams for point in points)
    least = min(point.at_once for point in points if point.streams == most)
    lines.append(
        f"- Most streams: {most}, of which at least {least} were decoding at one moment in every run"
    )
    same, requests = same_texts(records)
    lines.append(f"- Same output in every column: {same} of {requests} requests")
    return lines


def _mode(points: Sequence[Point], column: str) -> str:
    return next(point.mode for point in points if point.column == column)


def _crossing(crossing: Crossing, base: str) -> str:
    if crossing.streams is None:
        where = f"{crossing.column} is faster than {base} at every point (up to {crossing.last} streams)"
    else:
        where = f"{base} is faster than {crossing.column} from about {crossing.streams:.3g} streams on"
    if not crossing.has_interval:
        return where
    ends = ["beyond all" if end is None else f"{end:.3g}" for end in (crossing.low, crossing.high)]
    return f"{where} [{ends[0]}, {ends[1]}]"


def _cells(point: Point) -> list[str]:
    return [
        str(point.streams),
        point.column,
        _rate(point.total),
        _delta(point.over_base),
        "–" if point.decode is None else _rate(point.decode),
        _delta(point.decode_over_base),
        _figure(point.stream_rate),
        f"{_ms(point.ttft_p50)} / {_ms(point.ttft_p99)}",
        _ms(point.itl_p50),
        _ms(point.itl_p99),
        "–" if point.accept_length is None else f"{point.accept_length:.2f}",
        "–" if point.drafts is None else f"{point.drafts:.2f}",
        "–" if point.spec_share is None else f"{100 * point.spec_share:.0f} %",
        str(point.at_once),
    ]


def _short(point: Point) -> str:
    text = _figure(point.total.value)
    return f"**{text}**" if point.over_base is not None and point.over_base.value > 1.0 else text


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _ms(seconds: float) -> str:
    """Return milliseconds: whole ones from 100 on, three digits below."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.3g}"


def _rate(estimate: Estimate) -> str:
    if estimate.low == 0.0:  # too few runs
        return _figure(estimate.value)
    return f"{_figure(estimate.value)} [{_figure(estimate.low)}, {_figure(estimate.high)}]"


def _delta(ratio: Estimate | None) -> str:
    if ratio is None:
        return ""
    if ratio.low == 0.0:
        return f"{100 * (ratio.value - 1):+.1f} %"
    ends = ", ".join(f"{100 * (end - 1):+.1f}" for end in (ratio.low, ratio.high))
    return f"{100 * (ratio.value - 1):+.1f} % [{ends}]"


def _ratio(estimate: Estimate) -> str:
    if estimate.low == 0.0:
        return f"{estimate.value:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
