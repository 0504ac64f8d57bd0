"""When requests arrive: traces from a file, or made up from a seed. Plain data; no clock.

Three shapes of load, all open loops (arrivals do not wait for answers):

- ``poisson``: independent arrivals at one mean rate;
- ``burst``: a few lone requests, then ``peak`` more within ``ramp_s`` seconds, rising and falling, once a
  period. With answers that take longer than the ramp all of them run at once: 1 -> 250 -> 1;
- ``diurnal``: a rate that swings from ``rate`` up to ``peak_rate`` and back, once a period.

A file holds one JSON object a line: ``{"second": 0.5, "output_len": 64}`` and, as far as they are known,
``prompt`` (its text), ``index`` (into a data set), ``prompt_len`` and ``domain``.
"""

import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

POISSON: Final = "poisson"
BURST: Final = "burst"
DIURNAL: Final = "diurnal"
KINDS: Final = (POISSON, BURST, DIURNAL)
LONGEST: Final = 4.0
"""No length is more than this times its mean."""


class TraceError(ValueError):
    """A trace's file or options are wrong; the message says where and what to write."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace."""

    second: float  # since the trace began
    output_len: int  # tokens to generate
    index: int = 0  # which prompt of a data set; users take it modulo the set's size
    prompt_len: int = 0  # tokens, for users that make prompts up; 0: whatever the prompt has
    domain: str = ""  # which kind of text it is, where that matters (acceptance differs by it)
    prompt: str | None = None  # the text itself, where the file gives it


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What a generated trace is like."""

    duration_s: float = 60.0
    rate: float = 2.0  # arrivals a second: of poisson; between bursts; at night (diurnal)
    peak_rate: float = 20.0  # at noon (diurnal)
    peak: int = 249  # requests of one burst
    ramp_s: float = 2.0  # within which a burst's requests arrive
    period_s: float = 0.0  # from burst to burst, or of a day; 0: one in the whole trace
    output_len: int = 256  # mean
    prompt_len: int = 512  # mean
    spread: float = 0.0  # sigma of the log-normal lengths; 0: all equal to their mean
    domains: tuple[str, ...] = ()  # drawn from, evenly

    def period(self) -> float:
        """Return the seconds of one period."""
        return self.period_s or self.duration_s


DEFAULTS: Final = TraceOptions()


def arrivals(kind: str, seed: int = 0, options: TraceOptions = DEFAULTS) -> list[Arrival]:
    """Make up a trace; the same arguments always give the same one. The first request comes at second 0.

    Raises:
        TraceError: no such kind, or options that describe no trace.
    """
    _check(kind, options)
    times = random.Random(f"{kind} {seed} times")
    if kind == POISSON:
        later = _poisson(times, options.rate, options.duration_s)
    elif kind == BURST:
        later = _bursts(times, options)
    else:
        later = _diurnal(times, options)
    seconds = sorted(second for second in later if second < options.duration_s)
    lengths = random.Random(f"{kind} {seed} lengths")
    return [_arrival(index, second, lengths, options) for index, second in enumerate([0.0, *seconds])]


def read_trace(path: Path) -> list[Arrival]:
    """Read a trace's file; arrivals are sorted by time.

    Raises:
        TraceError: a line that is no arrival; its number and what is wrong are in the message.
    """
    found: list[Arrival] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            found.append(_parse(json.loads(line), len(found)))
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
    if not found:
        raise TraceError(f'{path} has no arrivals: write lines like {{"second": 0.5, "output_len": 64}}')
    return sorted(found, key=lambda arrival: arrival.second)


def write_trace(path: Path, trace: Iterable[Arrival]) -> None:
    """Write a trace as `read_trace` reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({k: v for k, v in asdict(arrival).items() if v is not None}) for arrival in trace]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def arrivals_by_second(trace: Sequence[Arrival]) -> list[int]:
    """Return how many requests arrive in each second of the trace."""
    counts = [0] * (int(trace[-1].second) + 1 if trace else 0)
    for arrival in trace:
        counts[int(arrival.second)] += 1
    return counts


def _poisson(source: random.Random, rate: float, duration: float) -> Iterator[float]:
    second = 0.0
    while rate > 0:
        second += source.expovariate(rate)
        if second >= duration:
            return
        yield second


def _bursts(source: random.Random, options: TraceOptions) -> Iterator[float]:
    """Yield the lone requests, and bursts whose rate rises and falls in a triangle, each mid-period."""
    yield from _poisson(source, options.rate, options.duration_s)
    half = options.ramp_s / 2
    for number in range(max(1, int(options.duration_s / options.period()))):
        middle = (number + 0.5) * options.period()
        for _ in range(options.peak):
            yield max(0.0, middle + source.triangular(-half, half, 0.0))


def _diurnal(source: random.Random, options: TraceOptions) -> Iterator[float]:
    """Thin out arrivals of the peak's rate; the trace begins and ends at night."""
    swing = options.peak_rate - options.rate
    for second in _poisson(source, options.peak_rate, options.duration_s):
        daylight = (1.0 - math.cos(2.0 * math.pi * second / options.period())) / 2.0
        if source.random() * options.peak_rate < options.rate + swing * daylight:
            yield second


def _arrival(index: int, second: float, source: random.Random, options: TraceOptions) -> Arrival:
    output_len = _length(source, options.output_len, options.spread)
    prompt_len = _length(source, options.prompt_len, options.spread)
    domain = source.choice(options.domains) if options.domains else ""
    return Arrival(round(second, 6), output_len, index, prompt_len, domain)


def _length(source: random.Random, mean: int, spread: float) -> int:
    """Return a length of the given mean (of the log-normal before it is bounded), at least 1."""
    drawn = mean * source.lognormvariate(-spread * spread / 2.0, spread)
    return max(1, round(min(drawn, LONGEST * mean)))


def _check(kind: str, options: TraceOptions) -> None:
    if kind not in KINDS:
        raise TraceError(f"no trace is called {kind!r}: write {', '.join(KINDS)}, or the path of a file")
    for name in ("duration_s", "output_len", "prompt_len"):
        if getattr(options, name) <= 0:
            raise TraceError(f"{name} of a trace must be above 0, not {getattr(options, name)}")
    for name in ("rate", "peak", "ramp_s", "period_s", "spread"):
        if getattr(options, name) < 0:
            raise TraceError(f"{name} of a trace can't be negative: {getattr(options, name)}")
    if kind == DIURNAL and options.peak_rate < options.rate:
        raise TraceError(f"peak_rate ({options.peak_rate}) is below rate ({options.rate})")


def _parse(line: Any, index: int) -> Arrival:
    if not isinstance(line, dict):
        raise ValueError("no JSON object")
    unknown = set(line) - set(Arrival.__dataclass_fields__)
    if unknown:
        raise ValueError(f"unknown field {', '.join(sorted(unknown))}")
    for name in ("second", "output_len"):
        if not isinstance(line.get(name), int | float) or isinstance(line[name], bool):
            raise ValueError(f"field {name!r} is missing or no number")
    if not math.isfinite(line["second"]) or line["second"] < 0 or line["output_len"] < 1:
        raise ValueError("'second' must be at least 0 and 'output_len' at least 1")
    return Arrival(
        second=float(line["second"]),
        output_len=int(line["output_len"]),
        index=int(line.get("index", index)),
        prompt_len=int(line.get("prompt_len", 0)),
        domain=str(line.get("domain", "")),
        prompt=line.get("prompt"),
    )
