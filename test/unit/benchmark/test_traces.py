"""Unit tests of arrival traces."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.traces import (
    KINDS,
    LONGEST,
    Arrival,
    TraceError,
    TraceOptions,
    arrivals,
    arrivals_by_second,
    read_trace,
    write_trace,
)

OPTIONS = st.builds(
    TraceOptions,
    duration_s=st.floats(1.0, 30.0),
    rate=st.floats(0.0, 5.0),
    peak_rate=st.floats(5.0, 20.0),
    peak=st.integers(0, 50),
    ramp_s=st.floats(0.0, 5.0),
    period_s=st.sampled_from([0.0, 3.0]),
    output_len=st.integers(1, 300),
    spread=st.sampled_from([0.0, 0.5, 2.0]),
    domains=st.sampled_from([(), ("coding", "chat")]),
)


@settings(max_examples=40, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 99), options=OPTIONS)
def test_a_trace_is_sorted_bounded_and_the_same_every_time(
    kind: str, seed: int, options: TraceOptions
) -> None:
    trace = arrivals(kind, seed, options)
    assert trace == arrivals(kind, seed, options)
    seconds = [arrival.second for arrival in trace]
    assert seconds == sorted(seconds)
    assert seconds[0] == 0.0
    assert seconds[-1] < options.duration_s + 1e-6
    assert [arrival.index for arrival in trace] == list(range(len(trace)))
    assert all(1 <= arrival.output_len <= round(LONGEST * options.output_len) for arrival in trace)
    assert all((arrival.domain in options.domains) == bool(options.domains) for arrival in trace)
    assert sum(arrivals_by_second(trace)) == len(trace)


def test_rates_are_those_asked_for() -> None:
    long = TraceOptions(duration_s=4000.0, rate=3.0, peak_rate=9.0, peak=100, ramp_s=10.0, period_s=1000.0)
    assert len(arrivals("poisson", 1, long)) == pytest.approx(12_000, rel=0.03)
    assert len(arrivals("diurnal", 1, long)) == pytest.approx(24_000, rel=0.03)  # the mean of 3 and 9
    assert len(arrivals("burst", 1, replace(long, rate=0.0))) == 1 + 4 * 100


def test_a_burst_comes_in_the_middle_within_its_ramp() -> None:
    trace = arrivals("burst", 7, TraceOptions(duration_s=20.0, rate=0.0, peak=249, ramp_s=2.0))
    inside = [arrival for arrival in trace if 9.0 <= arrival.second <= 11.0]
    assert len(trace) == 250
    assert len(inside) == 249


def test_days_are_busy_at_noon() -> None:
    day = TraceOptions(duration_s=1000.0, rate=1.0, peak_rate=10.0)
    counts = arrivals_by_second(arrivals("diurnal", 3, day))
    assert sum(counts[400:600]) > 4 * sum(counts[:200])


def test_lengths_keep_their_mean() -> None:
    trace = arrivals("poisson", 5, TraceOptions(duration_s=4000.0, output_len=200, spread=0.5))
    assert sum(arrival.output_len for arrival in trace) / len(trace) == pytest.approx(200, rel=0.05)
    equal = arrivals("poisson", 5, TraceOptions(output_len=200))
    assert {arrival.output_len for arrival in equal} == {200}


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    trace = [Arrival(0.5, 3, 4, 7, "chat", "text"), *arrivals("burst", 2, TraceOptions(peak=5))]
    path = tmp_path / "trace.jsonl"
    write_trace(path, trace)
    assert read_trace(path) == sorted(trace, key=lambda arrival: arrival.second)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "line 2: no JSON object"),
        ("{", "line 2: "),
        ('{"output_len": 3}', "'second' is missing"),
        ('{"second": true, "output_len": 3}', "'second' is missing or no number"),
        ('{"second": -1, "output_len": 3}', "at least 0"),
        ('{"second": NaN, "output_len": 3}', "at least 0"),
        ('{"second": 1, "output_len": 3, "len": 4}', "unknown field len"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"second": 0, "output_len": 1}}\n{line}\n')
    with pytest.raises(TraceError, match=message):
        read_trace(path)


def test_wrong_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="write poisson, burst, diurnal"):
        arrivals("sine")
    with pytest.raises(TraceError, match="output_len of a trace must be above 0"):
        arrivals("poisson", 0, TraceOptions(output_len=0))
    with pytest.raises(TraceError, match="peak_rate"):
        arrivals("diurnal", 0, TraceOptions(rate=3.0, peak_rate=1.0))
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(TraceError, match="has no arrivals"):
        read_trace(empty)


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
