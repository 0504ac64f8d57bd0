"""Unit tests of what is made of token arrival times, and of the report made of that."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.spec_toggle.client import GenerationError, StreamTrace, parse_trace
from benchmark.spec_toggle.prompts import Prompt, interleaved, stretch
from benchmark.spec_toggle.rates import add_waves, spec_count, tokens_at, wave_rate
from benchmark.spec_toggle.records import (
    MODES,
    RunRecord,
    append_record,
    read_run,
    same_texts,
    write_header,
)
from benchmark.spec_toggle.report import markdown, rows_of


def _trace(times: list[float], counts: list[int], started: float = 0.0) -> StreamTrace:
    return StreamTrace(started, tuple(times), tuple(counts), (), {})


def test_tokens_lie_on_straight_lines_between_events() -> None:
    trace = _trace([1.0, 2.0, 4.0], [1, 4, 8])
    assert [tokens_at(trace, t) for t in (0.5, 1.0, 1.5, 3.0, 4.0, 9.0)] == [0.0, 1.0, 2.5, 6.0, 8.0, 8.0]


def test_wave_rate_is_taken_while_all_streams_decode() -> None:
    first = _trace([1.0, 2.0, 3.0], [1, 2, 3])
    second = _trace([2.0, 3.0, 4.0, 5.0], [1, 3, 5, 7])
    rate = wave_rate([first, second])
    assert rate.decode_seconds == 1.0  # from 2.0 (second's first token) to 3.0 (first's last)
    assert rate.decode_rate == pytest.approx(3.0)
    assert (rate.total_tokens, rate.total_seconds) == (10, 5.0)


def test_a_last_step_that_arrives_just_after_the_span_is_not_lost() -> None:
    steps = [float(step) for step in range(11)]
    late = [time + 0.001 for time in steps]
    rate = wave_rate([_trace(steps, list(range(1, 12))), _trace(late, list(range(1, 12)))])
    assert rate.decode_rate == pytest.approx(2.0, rel=1e-3)


def test_streams_that_never_overlap_give_no_decode_rate() -> None:
    rate = wave_rate([_trace([1.0, 2.0], [1, 2]), _trace([3.0, 4.0], [1, 2])])
    assert (rate.decode_rate, rate.decode_tokens) == (0.0, 0.0)


def test_waves_add_up() -> None:
    wave = wave_rate([_trace([1.0, 3.0], [1, 5])])
    assert add_waves([wave, wave]).decode_rate == wave.decode_rate == 2.0


def test_spec_count_of_a_plainly_decoded_request_is_nothing() -> None:
    assert spec_count({"completion_tokens": 9}).accept_length is None
    assert spec_count({"spec_verify_ct": 4, "spec_accept_length": 2.5}).tokens == 10.0


def test_parse_trace_keeps_events_with_new_tokens_only() -> None:
    event = b'{"meta_info": {"completion_tokens": %d, "finish_reason": %s}, "output_ids": [7]}'
    received = [
        (1.0, event % (1, b"null")),
        (2.0, event % (1, b"null")),
        (3.0, event % (3, b'{"type": "length"}')),
    ]
    trace = parse_trace(0.5, received)
    assert (trace.times, trace.counts, trace.output_ids) == ((1.0, 3.0), (1, 3), (7,))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"error": {"message": "too long"}}', "too long"),
        (b'{"meta_info": {"completion_tokens": 1, "finish_reason": null}}', "before the request was"),
        (b'{"meta_info": {"completion_tokens": 1, "finish_reason": {"type": "abort"}}}', "aborted"),
    ],
)
def test_parse_trace_refuses_streams_that_went_wrong(data: bytes, message: str) -> None:
    with pytest.raises(GenerationError, match=message):
        parse_trace(0.0, [(1.0, data)])


def test_prompts_are_mixed_and_go_round() -> None:
    prompts = [Prompt(name, name[0], "") for name in ("a1", "a2", "a3", "b1")]
    mixed = interleaved(prompts)
    assert [prompt.id for prompt in mixed] == ["a1", "b1", "a2", "a3"]
    assert [prompt.id for prompt in stretch(mixed, 6, 5)] == ["a2", "a3", "a1", "b1", "a2"]


def _records(streams: int, rates: dict[str, float]) -> list[RunRecord]:
    return [
        RunRecord(
            mode=mode, streams=streams, round=index, position=0,
            decode_rate=rates[mode] * (1 + index / 100), total_rate=rates[mode] * 0.8,
            decode_tokens=10.0, decode_seconds=1.0, total_tokens=10, total_seconds=1.0,
            spec_tokens=28.0 if mode == "spec" else 0.0, spec_steps=10 if mode == "spec" else 0,
            steps_plain=0, steps_spec=10, prompt_ids=("p",),
            text_hashes=(f"{streams}{index}",),
        )
        for index in range(5)
        for mode in MODES
    ]  # fmt: skip


def test_report_of_a_known_run(tmp_path: Path) -> None:
    slow = {"plain": 10.0, "spec": 20.0, "toggle": 19.8, "plain+drafter": 9.9}
    fast = {"plain": 40.0, "spec": 20.0, "toggle": 38.0, "plain+drafter": 40.0}
    path = tmp_path / "runs.jsonl"
    write_header(path, {"machine": "two cores"})
    for record in _records(1, slow) + _records(4, fast):
        append_record(path, record)
    run = read_run(path)
    assert same_texts(run.records) == (10, 10)
    first, second = rows_of(run.records)
    assert first.spec_over_plain.value == pytest.approx(2.0)
    assert first.accept_length == pytest.approx(2.8)
    assert second.toggle_over_best.value == pytest.approx(0.95)
    text = markdown(run)
    assert "2.00 [2.00, 2.00] of plain (wanted >= 1.4): yes" in text
    assert "worst point (4 streams): 0.95 [0.95, 0.95] (wanted >= 0.97): NO" in text
    assert "worst point (1 streams): 1.010 [1.010, 1.010] (wanted <= 1.02): yes" in text
    assert "plain wins beyond about 2.5 streams" in text


def test_report_of_an_interrupted_run_uses_what_every_mode_finished() -> None:
    rates = dict.fromkeys(MODES, 10.0)
    records = _records(1, rates)[:-2] + _records(2, rates)[:1]
    assert [row.streams for row in rows_of(records)] == [1]


def test_report_leaves_out_rounds_without_a_rate() -> None:
    records = _records(1, {"plain": 10.0, "spec": 20.0, "toggle": 20.0, "plain+drafter": 10.0})
    records[0] = replace(records[0], decode_rate=0.0)
    (row,) = rows_of(records)
    assert row.decode["spec"].low == pytest.approx(20.0 * 1.01)  # of the second round
    assert rows_of([replace(record, decode_rate=0.0) for record in records]) == []


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
