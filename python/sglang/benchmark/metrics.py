"""Figures of a serving run from its outcomes: upstream's names and definitions. No I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from sglang.benchmark.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Spread:
    """Milliseconds; zeros where there are no samples."""

    mean: float
    median: float
    std: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        values = np.asarray(seconds if len(seconds) else [0.0]) * 1000
        p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99]).tolist()
        return Spread(float(values.mean()), p50, float(values.std()), p90, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class Summary:
    """A run. Failed requests count nowhere."""

    duration: float
    completed: int
    total_input_tokens: int
    total_output_tokens: int
    total_output_tokens_retokenized: int | None  # None: no tokenizer
    request_throughput: float
    input_throughput: float
    output_throughput: float
    total_throughput: float
    concurrency: float
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    e2e_latency: Spread
    ttft: Spread
    tpot: Spread
    itl: Spread

    def record(self) -> dict[str, float | int | None]:
        """The keys of a JSON line."""
        values = asdict(self)
        flat: dict[str, float | int | None] = {}
        for name, value in values.items():
            if isinstance(value, dict):
                flat |= {f"{which}_{name}_ms": number for which, number in value.items() if which != "max"}
            else:
                flat[name] = value
        flat["total_input_text_tokens"] = self.total_input_tokens
        flat["total_input_vision_tokens"] = 0
        return flat


def tpot(outcome: Outcome) -> float:
    """Seconds a token after the first one; of requests with at least two tokens."""
    return (outcome.latency - outcome.ttft) / (outcome.output_len - 1)


def summarise(outcomes: Sequence[Outcome], duration: float, retokenized: int | None) -> Summary:
    """``duration``: seconds from the first request's start to the last one's end."""
    good = [outcome for outcome in outcomes if outcome.success]
    num_in, num_out = sum(o.prompt_len for o in good), sum(o.output_len for o in good)
    return Summary(
        duration=duration,
        completed=len(good),
        total_input_tokens=num_in,
        total_output_tokens=num_out,
        total_output_tokens_retokenized=retokenized,
        request_throughput=len(good) / duration,
        input_throughput=num_in / duration,
        output_throughput=num_out / duration,
        total_throughput=(num_in + num_out) / duration,
        concurrency=sum(o.latency for o in good) / duration,
        max_output_tokens_per_s=busiest_second(good),
        max_concurrent_requests=peak_concurrency(good),
        e2e_latency=Spread.of([o.latency for o in good]),
        ttft=Spread.of([o.ttft for o in good]),
        tpot=Spread.of([tpot(o) for o in good if o.output_len > 1]),
        itl=Spread.of([gap for o in good for gap in o.itl]),
    )


def busiest_second(outcomes: Sequence[Outcome]) -> float:
    """Most tokens in one of the seconds that the run is divided into."""
    begin = min((o.started for o in outcomes), default=0.0)
    seconds: Counter[int] = Counter()
    for outcome in outcomes:
        times = outcome.token_times()
        seconds.update(int(moment - begin) for moment in times)
        # Tokens that came with the first event have no gap of their own.
        seconds[int(times[0] - begin)] += max(0, outcome.output_len - len(times))
    return float(max(seconds.values(), default=0))


def peak_concurrency(outcomes: Sequence[Outcome]) -> int:
    """Most requests that ran at one moment."""
    changes = [(o.started, 1) for o in outcomes] + [(o.started + o.latency, -1) for o in outcomes]
    running = peak = 0
    for _, change in sorted(changes):  # one that ends when another begins makes place for it
        running += change
        peak = max(peak, running)
    return peak


def goodput(outcomes: Sequence[Outcome], limits_ms: dict[str, float], duration: float) -> float:
    """Requests a second that kept every limit (keys: ttft, tpot, e2el)."""

    def keeps(outcome: Outcome) -> bool:
        per_token = tpot(outcome) if outcome.output_len > 1 else 0.0
        reached = {"ttft": outcome.ttft, "tpot": per_token, "e2el": outcome.latency}
        return all(reached[name] * 1000 <= limit for name, limit in limits_ms.items())

    return sum(o.success and keeps(o) for o in outcomes) / duration
