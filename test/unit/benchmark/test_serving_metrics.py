"""Arithmetic of the serving benchmarks. Run alone: pytest test/unit/benchmark/test_serving_metrics.py"""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.benchmark.batch_metrics import batch_figures, tokens_between
from sglang.benchmark.load import arrival_times
from sglang.benchmark.metrics import busiest_second, goodput, peak_concurrency, summarise, tpot
from sglang.benchmark.outcome import Outcome, TokenTimes
from sglang.benchmark.stream_readers import NativeReader, StreamError, number_after

GAPS = st.floats(0.001, 2.0)
EVENTS = st.lists(st.tuples(GAPS, st.integers(1, 5)), min_size=1, max_size=12)


def outcome_of(started: float, events: list[tuple[float, int]]) -> Outcome:
    times, now, count = TokenTimes(started), started, 0
    for gap, new in events:
        now, count = now + gap, count + new
        times.reach(now, count)
    return Outcome(started, now - started, times.ttft(now), tuple(times.itl), "", 10, count)


OUTCOMES = st.lists(st.builds(outcome_of, st.floats(0, 5), EVENTS), min_size=1, max_size=8)


@settings(max_examples=40)
@given(EVENTS)
def test_gaps_are_the_time_from_the_first_event_to_the_last(events: list[tuple[float, int]]) -> None:
    outcome = outcome_of(3.0, events)
    assert len(outcome.itl) == outcome.output_len - events[0][1]
    assert math.fsum(outcome.itl) == pytest.approx(outcome.latency - outcome.ttft, abs=1e-9)
    assert outcome.ttft == pytest.approx(events[0][0])
    place = 0
    for gap, new in events[1:]:  # k tokens at once are k equal gaps
        assert outcome.itl[place : place + new] == pytest.approx([gap / new] * new, abs=1e-9)
        place += new
    if outcome.output_len > 1:
        assert tpot(outcome) * (outcome.output_len - 1) == pytest.approx(outcome.latency - outcome.ttft)


@settings(max_examples=25)
@given(OUTCOMES, st.lists(st.just(Outcome(0.0, error="no")), max_size=3))
def test_sums_count_what_succeeded(good: list[Outcome], bad: list[Outcome]) -> None:
    duration = 20.0
    summary = summarise([*bad, *good], duration, None)
    assert summary.completed == len(good) and summary.total_input_tokens == 10 * len(good)
    assert summary.output_throughput * duration == pytest.approx(sum(o.output_len for o in good))
    assert summary.total_throughput == pytest.approx(summary.input_throughput + summary.output_throughput)
    assert summary.concurrency * duration == pytest.approx(sum(o.latency for o in good))
    spread = summary.e2e_latency
    assert spread.median <= spread.p90 <= spread.p95 <= spread.p99 <= spread.max + 1e-9
    assert summary.max_output_tokens_per_s <= summary.total_output_tokens
    limits = {"ttft": 1000.0, "e2el": 3000.0}
    kept = sum(o.ttft <= 1.0 and o.latency <= 3.0 for o in good)
    assert goodput([*bad, *good], limits, duration) == pytest.approx(kept / duration)


@settings(max_examples=25)
@given(OUTCOMES)
def test_the_peak_is_reached_at_a_start(outcomes: list[Outcome]) -> None:
    at_starts = [
        sum(o.started <= moment.started < o.started + o.latency for o in outcomes) for moment in outcomes
    ]
    assert peak_concurrency(outcomes) == max(at_starts)


@settings(max_examples=25)
@given(OUTCOMES)
def test_seconds_hold_all_tokens(outcomes: list[Outcome]) -> None:
    length = math.ceil(max(o.started + o.latency for o in outcomes) - min(o.started for o in outcomes)) + 1
    total = sum(o.output_len for o in outcomes)
    assert total / length <= busiest_second(outcomes) <= total


@settings(max_examples=25)
@given(OUTCOMES, st.lists(st.floats(0, 40), min_size=3, max_size=3).map(sorted))
def test_windows_add_up(outcomes: list[Outcome], moments: list[float]) -> None:
    begin, middle, end = moments
    parts = tokens_between(outcomes, begin, middle) + tokens_between(outcomes, middle, end)
    assert parts == tokens_between(outcomes, begin, end)
    assert tokens_between(outcomes, -1, 1000) == sum(len(o.itl) for o in outcomes)


@settings(max_examples=25)
@given(OUTCOMES)
def test_figures_of_a_batch(outcomes: list[Outcome]) -> None:
    longest = max(o.output_len for o in outcomes)
    figures = batch_figures(outcomes, longest)
    assert figures.total_output_tokens == sum(o.output_len for o in outcomes)
    assert figures.num_early_stopped == sum(o.output_len < longest for o in outcomes)
    assert 0 < figures.last_ttft <= figures.latency + 1e-9
    assert figures.input_throughput * figures.last_ttft == pytest.approx(10 * len(outcomes))
    everything = figures.overall_throughput * figures.latency
    assert everything == pytest.approx(10 * len(outcomes) + figures.total_output_tokens)
    first_end, all_begun = (
        min(o.started + o.latency for o in outcomes),
        max(o.started + o.ttft for o in outcomes),
    )
    assert (figures.steady_state_window_s is None) == (first_end <= all_begun)


@settings(max_examples=50)
@given(st.text(), st.text(), st.integers(0, 10**6))
def test_a_number_is_found_without_parsing(text: str, more: str, count: int) -> None:
    tricky = f'{text}"completion_tokens": 5, {more}'
    for separators in ((",", ":"), (", ", ": ")):
        meta = {"completion_tokens": count, "finish_reason": {"type": "stop", "matched": tricky}}
        data = json.dumps({"text": tricky, "meta_info": meta}, separators=separators).encode()
        assert number_after(b'"completion_tokens":', data) == count
    assert number_after(b'"completion_tokens":', json.dumps({"text": tricky}).encode()) is None


def test_a_stream_that_ends_early_or_is_given_up_is_a_failure() -> None:
    meta = {"completion_tokens": 1, "prompt_tokens": 1, "finish_reason": None}
    for reason in (None, {"type": "abort", "message": "too long in the queue"}):
        reader = NativeReader(0.0)
        event = {"text": "a", "output_ids": [1], "meta_info": {**meta, "finish_reason": reason}}
        reader.feed(1.0, json.dumps(event).encode())
        with pytest.raises(StreamError, match="queue" if reason else "before the request was finished"):
            reader.outcome(2.0)


@settings(max_examples=40)
@given(st.integers(1, 300), st.floats(0.1, 1000), st.integers(0, 99))
def test_arrivals_begin_at_once_and_never_go_back(count: int, rate: float, seed: int) -> None:
    times = arrival_times(count, rate, seed)
    assert len(times) == count and times[0] == 0 and times == sorted(times)
    assert times == arrival_times(count, rate, seed)
    assert arrival_times(count, math.inf, seed) == [0.0] * count


def test_arrivals_have_the_rate() -> None:
    times = arrival_times(20000, 50.0, 1)
    assert 20000 / times[-1] == pytest.approx(50.0, rel=0.03)
