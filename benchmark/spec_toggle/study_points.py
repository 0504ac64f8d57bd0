"""From the study's records to what is said about each point: estimates, deltas, crossovers. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from benchmark.spec_toggle.columns import AUTO, STUDY_MODES
from benchmark.spec_toggle.records import PLAIN, PLAIN_WITH_DRAFTER, SPEC, TOGGLE
from benchmark.spec_toggle.stats import Estimate, crossover, few_estimate, few_ratio
from benchmark.spec_toggle.study_records import FIXED, StudyRecord

CHOOSING: Final = (TOGGLE, AUTO)
"""Modes that choose between the others."""


@dataclass(frozen=True, slots=True)
class Point:
    """One column at one number of streams in one domain."""

    domain: str
    streams: int
    column: str
    mode: str
    runs: int
    total: Estimate  # tok/s
    decode: Estimate | None  # tok/s while all streams decode; None where they never all did
    over_base: Estimate | None  # total, of the base column in the same rounds; None for itself
    decode_over_base: Estimate | None
    stream_rate: float
    ttft_p50: float
    ttft_p99: float
    itl_p50: float
    itl_p99: float
    at_once: int
    accept_length: float | None
    drafts: float | None  # of a speculative step
    spec_share: float | None


@dataclass(frozen=True, slots=True)
class Crossing:
    """From how many streams on a column is slower than the base; None: nowhere measured."""

    domain: str
    column: str
    streams: float | None
    low: float | None  # of the ratios' lower ends: the earliest it may be
    high: float | None
    has_interval: bool  # every point has several runs
    last: int  # most streams measured


def base_column(records: Sequence[StudyRecord]) -> str:
    """Return the column that the others are compared with: a plain one if there is one."""
    return in_order(records)[0]


def in_order(records: Sequence[StudyRecord]) -> list[str]:
    """Return the columns: plain ones first, then the other modes, then foreign servers as they came."""
    columns = dict.fromkeys((record.column, record.mode) for record in records)
    modes = dict.fromkeys((PLAIN, PLAIN_WITH_DRAFTER, *STUDY_MODES))
    ranks = {mode: rank for rank, mode in enumerate(modes)}
    return [name for name, _ in sorted(columns, key=lambda column: ranks.get(column[1], len(ranks)))]


def points_of(records: Sequence[StudyRecord], base: str) -> list[Point]:
    """Return all points: domains in the order of the file, streams ascending, columns as `in_order`."""
    domains = dict.fromkeys(record.domain for record in records)
    columns = in_order(records)
    counts = sorted({record.streams for record in records})
    keys = ((domain, streams, column) for domain in domains for streams in counts for column in columns)
    found = []
    for domain, streams, column in keys:
        runs = _runs(records, domain, streams, column)
        if runs:
            found.append(_point(runs, _runs(records, domain, streams, base)))
    return found


def crossings(points: Sequence[Point], decode: bool = False) -> list[Crossing]:
    """Return where each column falls below the base, by domain; by the decode rate if asked to."""
    keys = dict.fromkeys((point.domain, point.column) for point in points if point.domain != FIXED)
    found = []
    for domain, column in keys:
        of_both = [(p, p.decode_over_base if decode else p.over_base) for p in points
                   if (p.domain, p.column) == (domain, column)]  # fmt: skip
        row = [(point.streams, ratio) for point, ratio in of_both if ratio is not None]
        if len(row) > 1:
            streams = [count for count, _ in row]
            at, low, high = (
                crossover(streams, [pick(ratio) for _, ratio in row])
                for pick in (lambda r: r.value, lambda r: r.low, lambda r: r.high)
            )
            is_sure = all(ratio.low > 0 for _, ratio in row)
            found.append(Crossing(domain, column, at, low, high, is_sure, streams[-1]))
    return found


def over_better(records: Sequence[StudyRecord]) -> list[tuple[str, str, int, Estimate]]:
    """Return (column, domain, streams, ratio) of columns that choose, to the better fixed mode there.

    The fixed modes are those of the same server where it has them (plain steps with a drafter), or else all.
    """
    found = []
    keys = dict.fromkeys((r.column, r.domain, r.streams) for r in records if r.mode in CHOOSING)
    for column, domain, streams in sorted(keys, key=lambda key: (key[0], key[1], key[2])):
        server = column.rpartition(":")[0]
        fixed = {
            r.column for r in records
            if (r.domain, r.streams) == (domain, streams) and r.mode not in (*CHOOSING, "")
            and r.column.rpartition(":")[0] == server
        }  # fmt: skip
        own = _runs(records, domain, streams, column)
        ratios = [_over(own, _runs(records, domain, streams, other), _total) for other in sorted(fixed)]
        known = [ratio for ratio in ratios if ratio is not None]
        if known:
            found.append((column, domain, streams, min(known, key=lambda ratio: ratio.value)))
    return found


def accept_lengths(records: Sequence[StudyRecord]) -> dict[str, tuple[float, int]]:
    """Return (tokens a speculative step, steps) by domain, where every step speculates."""
    found = {}
    for domain in dict.fromkeys(record.domain for record in records):
        runs = [record for record in records if record.domain == domain and record.mode in (SPEC, "")]
        steps = sum(record.spec_steps for record in runs)
        if steps:
            found[domain] = (sum(record.spec_tokens for record in runs) / steps, steps)
    return found


def same_texts(records: Sequence[StudyRecord]) -> tuple[int, int]:
    """Return (requests whose output was the same in every column, requests)."""
    texts: dict[tuple[str, int, int, int], set[str]] = {}
    for record in records:
        for index, text in enumerate(record.text_hashes):
            texts.setdefault((record.domain, record.streams, record.round, index), set()).add(text)
    return sum(len(different) == 1 for different in texts.values()), len(texts)


def _runs(records: Sequence[StudyRecord], domain: str, streams: int, column: str) -> list[StudyRecord]:
    return [r for r in records if (r.domain, r.streams, r.column) == (domain, streams, column)]


def _point(runs: Sequence[StudyRecord], base: Sequence[StudyRecord]) -> Point:
    first = runs[0]
    decode = [record.decode_rate for record in runs if record.decode_rate > 0]
    is_base = bool(base) and base[0].column == first.column
    steps = sum(record.spec_steps for record in runs)
    drafts = [record.spec_drafts for record in runs]
    shares = [record.spec_share for record in runs]
    return Point(
        domain=first.domain,
        streams=first.streams,
        column=first.column,
        mode=first.mode,
        runs=len(runs),
        total=few_estimate([record.total_rate for record in runs]),
        decode=few_estimate(decode) if decode else None,
        over_base=None if is_base else _over(runs, base, _total),
        decode_over_base=None if is_base else _over(runs, base, _decode),
        stream_rate=_mean([record.stream_rate for record in runs]),
        ttft_p50=_mean([record.ttft_p50 for record in runs]),
        ttft_p99=_mean([record.ttft_p99 for record in runs]),
        itl_p50=_mean([record.itl_p50 for record in runs]),
        itl_p99=_mean([record.itl_p99 for record in runs]),
        at_once=min(record.at_once for record in runs),
        accept_length=sum(record.spec_tokens for record in runs) / steps if steps else None,
        drafts=sum(count for count in drafts if count) / steps if steps and None not in drafts else None,
        spec_share=_mean([share for share in shares if share is not None]) if None not in shares else None,
    )


def _over(
    runs: Sequence[StudyRecord], base: Sequence[StudyRecord], rate: Callable[[StudyRecord], float]
) -> Estimate | None:
    """Return the ratio of the rates, paired by round; None where no round has both."""
    beneath = {record.round: rate(record) for record in base if rate(record) > 0}
    pairs = [(rate(r), beneath[r.round]) for r in runs if rate(r) > 0 and r.round in beneath]
    return few_ratio([top for top, _ in pairs], [bottom for _, bottom in pairs]) if pairs else None


def _total(record: StudyRecord) -> float:
    return record.total_rate


def _decode(record: StudyRecord) -> float:
    return record.decode_rate


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
