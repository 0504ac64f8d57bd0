"""The study and the trace replay: against servers that generate nothing; what is made of their records."""

import io
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import write_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark import doc_section
from benchmark.doc_section import SectionError, replace_section
from benchmark.spec_toggle import replay, servers, study
from benchmark.spec_toggle.client import StreamTrace
from benchmark.spec_toggle.columns import mode_change
from benchmark.spec_toggle.latency import event_gaps, most_at_once, stream_rate, token_gaps
from benchmark.spec_toggle.replay_figures import Steps, near_gaps, seconds_of, switch_windows, whole_of
from benchmark.spec_toggle.replay_run import Replay, ServerState
from benchmark.spec_toggle.servers import Server, running_server, wait_until_healthy
from benchmark.spec_toggle.stats import crossover, few_estimate, few_ratio, student_95
from benchmark.spec_toggle.study_options import named_url, parse_arguments
from benchmark.spec_toggle.study_points import base_column, crossings, over_better, points_of
from benchmark.spec_toggle.study_records import Place, StudyRecord, read_study, record_of
from benchmark.spec_toggle.study_report import markdown
from benchmark.spec_toggle.study_run import Budget

FAKE_SERVER = (sys.executable, str(Path(__file__).with_name("fake_server.py")))


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    folder = tmp_path_factory.mktemp("fake")
    with (
        running_server("ours", [], folder, FAKE_SERVER) as ours,
        running_server("foreign", ["--foreign"], folder, FAKE_SERVER) as foreign,
    ):
        for server in (ours, foreign):
            _wait(server)
        yield ours.base_url, foreign.base_url


def _wait(server: Server) -> None:
    wait_until_healthy(server, 30.0)


@pytest.mark.timeout(180)
def test_the_study_of_running_servers(urls: tuple[str, str], tmp_path: Path) -> None:
    document = tmp_path / "doc.md"
    document.write_text("before\n<!-- begin here -->\nold\n<!-- end here -->\nafter\n")
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    flags = ["--base-url", f"ours={urls[0]}", "--base-url", f"other={urls[1]}", "--tokenizer", str(tokenizer)]
    flags += ["--modes", "plain,spec,auto", "--streams", "1,8", "--tokens", "31", "--num-prompts", "4"]
    flags += ["--datasets", "bfcl", "--rounds", "2", "--min-prompts", "1", "--out", str(tmp_path / "out")]
    assert study.main([*flags, "--update-doc", str(document), "--section", "here"]) == 0
    header, records = read_study([tmp_path / "out" / "runs.jsonl"])
    names = ["ours:plain+drafter", "ours:spec", "ours:auto", "other"]
    points = points_of(records, base_column(records))
    assert [p.column for p in points if (p.domain, p.streams) == ("agentic", 8)] == names
    assert {(p.domain, p.streams) for p in points} == {("agentic", 1), ("agentic", 8), ("fixed", 1)}
    at = {(p.domain, p.column, p.streams): p for p in points}
    assert all(point.runs == 2 and point.at_once == point.streams for point in points)
    assert at["agentic", "ours:spec", 8].accept_length == 3.0
    assert at["agentic", "ours:auto", 1].spec_share == 1.0
    assert (at["agentic", "ours:auto", 8].spec_share or 1.0) < 0.5  # all but the last few streams' steps
    assert at["agentic", "other", 8].spec_share is None
    assert {r.total_tokens for r in records if r.streams == 8} == {248}
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "\nold\n" not in text
    assert "| agentic | **ours:spec**" in text or "| agentic | ours:spec" in text
    assert "of which at least 8 were decoding at one moment" in text
    assert (tmp_path / "out" / "study.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "out" / "study.svg").read_text()
    assert header["servers"] == "ours (native), other (chat)"


@pytest.mark.timeout(180)
def test_a_burst_is_replayed_in_every_mode(urls: tuple[str, str], tmp_path: Path) -> None:
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    flags = ["--base-url", f"ours={urls[0]}", "--tokenizer", str(tokenizer), "--out", str(tmp_path)]
    flags += ["--duration", "1", "--peak", "12", "--ramp", "0.1", "--output-len", "90", "--poll", "0.02"]
    assert replay.main([*flags, "--rate", "5", "--modes", "plain,spec,2"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "replays.jsonl").read_text().splitlines()]
    wholes = {line["column"]: line for line in lines if "e2e_mean" in line}
    assert list(wholes) == ["plain", "spec", "N=2"]
    assert wholes["plain"]["spec_steps"] == wholes["spec"]["plain_steps"] == 0
    assert wholes["N=2"]["plain_steps"] > 0 and wholes["N=2"]["spec_steps"] > 0
    assert wholes["N=2"]["switches"] >= 2
    assert all(whole["most_running"] >= 12 and whole["failed"] == 0 for whole in wholes.values())
    for name, whole in wholes.items():
        seconds = [line for line in lines if line.get("column") == name and "e2e_mean" not in line]
        assert sum(second["tokens"] for second in seconds) == whole["tokens"]
    assert (tmp_path / "replays.png").stat().st_size > 10_000
    assert "| N=2 |" in (tmp_path / "report.md").read_text()


def test_wrong_input_is_answered_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nowhere = f"x=http://127.0.0.1:{servers.free_port()}"
    assert study.main(["--base-url", nowhere, "--out", str(tmp_path)]) == 1
    assert "no server answers at" in capsys.readouterr().err
    assert replay.main(["--trace", "none", "--out", str(tmp_path)]) == 1
    assert "none of poisson, burst, diurnal" in capsys.readouterr().err
    (tmp_path / "x.jsonl").write_text("{}\n")
    assert study.main(["--from-jsonl", str(tmp_path / "x.jsonl"), "--out", str(tmp_path)]) == 1
    assert "first line has no header" in capsys.readouterr().err
    for flags, message in ((["--modes", "fast"], "--modes knows plain"), (["--streams", "0"], "from 1 on")):
        with pytest.raises(SystemExit):
            parse_arguments("", flags)
        assert message in capsys.readouterr().err
    assert named_url("a=http://h:1") == ("a", "http://h:1")
    assert named_url("http://h:1/") == ("h:1", "http://h:1/")
    with pytest.raises(ValueError, match="no section 'here': write the lines"):
        replace_section(tmp_path / "none.md", "here", "text")
    assert issubclass(SectionError, ValueError)


def test_a_section_is_taken_from_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "doc.md"
    document.write_text("<!-- begin a -->\n<!-- end a -->\n<!-- begin b -->\nkept\n<!-- end b -->\n")
    for text in ("| first |", "| table |"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert doc_section.main([str(document), "a"]) == 0
    assert document.read_text() == (
        "<!-- begin a -->\n\n| table |\n\n<!-- end a -->\n<!-- begin b -->\nkept\n<!-- end b -->\n"
    )
    for text, name, message in (("", "a", "nothing came"), ("x", "c", "write the lines <!-- begin c -->")):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert doc_section.main([str(document), name]) == 1
        assert message in capsys.readouterr().err


# Statistics.


@settings(deadline=None)
@given(st.lists(st.floats(0.1, 1e4), min_size=2, max_size=12), st.floats(0.01, 100.0))
def test_estimates_of_few_values_hold_their_mean_and_scale(values: list[float], factor: float) -> None:
    estimate = few_estimate(values)
    assert min(values) * 0.999 <= estimate.value <= max(values) * 1.001
    assert estimate.low <= estimate.value <= estimate.high
    scaled = few_estimate([value * factor for value in values])
    assert scaled.value == pytest.approx(estimate.value * factor)
    assert few_ratio([value * factor for value in values], values).value == pytest.approx(factor)


def test_intervals_of_few_values_cover_the_truth_about_95_times_in_100() -> None:
    import numpy as np

    random = np.random.default_rng(3)
    for size in (3, 4, 12):
        samples = np.exp(random.normal(0.0, 0.1, size=(2000, size)))
        covered = np.mean([few_estimate(sample.tolist()).contains(1.0) for sample in samples])
        assert 0.935 <= covered <= 0.965, size
    assert student_95(11) == pytest.approx(2.201, abs=3e-3)
    assert student_95(1000) == pytest.approx(1.962, abs=1e-3)
    for too_few in ([3.0], [2.0, 4.5]):
        alone = few_estimate(too_few)
        assert (alone.value, alone.low, alone.high) == (pytest.approx(3.0), 0.0, math.inf)


@given(
    st.lists(st.tuples(st.floats(0.2, 3.0), st.floats(0.0, 1.0)), min_size=2, max_size=8),
)
def test_higher_ratios_never_cross_earlier(rows: list[tuple[float, float]]) -> None:
    points = [2**index for index in range(len(rows))]
    low = crossover(points, [ratio for ratio, _ in rows])
    high = crossover(points, [ratio + more for ratio, more in rows])
    if low is None:
        assert high is None
    else:
        assert points[0] <= low <= points[-1]
        assert high is None or high >= low - 1e-9


# Waiting times.

TRACES = st.lists(
    st.lists(st.tuples(st.floats(0.001, 1.0), st.integers(1, 5)), min_size=1, max_size=8),
    min_size=1,
    max_size=6,
)


def _traces(steps: list[list[tuple[float, int]]]) -> list[StreamTrace]:
    found = []
    for number, events in enumerate(steps):
        times, counts, moment, count = [], [], 0.1 * number, 0
        for wait, tokens in events:
            moment, count = moment + wait, count + tokens
            times.append(moment)
            counts.append(count)
        found.append(StreamTrace(0.1 * number, tuple(times), tuple(counts), (), {}))
    return found


@given(TRACES)
def test_waits_and_tokens_add_up(steps: list[list[tuple[float, int]]]) -> None:
    traces = _traces(steps)
    for trace in traces:
        assert len(token_gaps(trace)) == trace.counts[-1] - trace.counts[0]
        assert sum(token_gaps(trace)) == pytest.approx(trace.times[-1] - trace.times[0])
        assert sum(event_gaps(trace)) == pytest.approx(trace.times[-1] - trace.times[0])
        assert stream_rate(trace) >= 0.0
    assert 1 <= most_at_once(traces) <= len(traces)
    seconds = seconds_of("c", 0, Replay(tuple(traces), (), (), 0.0))
    assert sum(second.tokens for second in seconds) == sum(trace.counts[-1] for trace in traces)


def test_requests_that_touch_were_there_together() -> None:
    first, second = StreamTrace(0, (1.0, 2.0), (1, 2), (), {}), StreamTrace(0, (2.0,), (1,), (), {})
    later = StreamTrace(0, (2.5, 3.0), (1, 2), (), {})
    assert most_at_once([first, second, later]) == 2


def test_steps_near_a_switch_are_told_from_the_streams() -> None:
    """40 ms steps, 20 ms in plain mode; the switch at 2 s costs nothing or a wait of 200 ms."""
    states = tuple(ServerState(0.5 * i, 10 * i, 0, int(i > 4), {"3:cost": i}) for i in range(9))
    fast, slow = _steady(0.02), _steady(0.04)
    assert switch_windows(slow := Replay(slow.traces, states, (), 0.0)) == [(2.0, pytest.approx(3.5))]
    assert all(2.0 <= gap.begin <= 3.5 for gap in near_gaps(slow))
    fixed = {"plain": fast, "spec": _steady(0.04)}
    whole = whole_of("auto", "auto", 0, slow, fixed)
    assert whole.steady_p99 == pytest.approx(0.04)
    assert whole.near_p99 == pytest.approx(0.04)
    assert (whole.plain_steps, whole.switches, whole.by_drafts) == (80, 1, {"0": 80, "3": 8})
    counts = {"0:probe": 1, "3:probe": 2, "3:cost": 4, "1:memory": 0}
    assert (Steps(9, 6, 1, counts).by_drafts(), Steps(9, 6, 1, counts).probes()) == ({"0": 9, "3": 6}, 3)
    stalled = Replay(_steady(0.04, stall_at=2.2).traces, states, (), 0.0)
    assert whole_of("auto", "auto", 0, stalled, fixed).near_p99 == pytest.approx(0.2, rel=0.3)
    assert whole_of("auto", "auto", 0, slow, {"plain": fast}).steady_p99 is None


def _steady(step_s: float, stall_at: float = math.inf) -> Replay:
    times, moment = [], 0.0
    while moment < 4.0:
        moment += 0.2 if moment <= stall_at < moment + step_s else step_s
        times.append(moment)
    trace = StreamTrace(0.0, tuple(times), tuple(range(1, len(times) + 1)), (), {})
    return Replay((trace,) * 8, (), (), 0.0)


# Records, points, the report.


def _study(rates: dict[str, dict[int, float]]) -> list[StudyRecord]:
    """Records of two rounds, the second 10 % faster in all columns."""
    records = []
    for column, by_streams in rates.items():
        for streams, rate in by_streams.items():
            for index in range(3):
                seconds = 10.0 / (rate * (0.9 + index / 10))
                times = (0.1 * seconds, seconds)
                trace = StreamTrace(
                    0.0, times, (1, 10), (1,), {"decode_steps_plain": 9, "decode_steps_spec": 0}
                )
                place = Place(column, column, "coding", streams, index, 0)
                records.append(record_of(place, [[trace]], ["p"]))
    return records


def test_points_are_paired_by_round() -> None:
    records = _study({
        "spec": {1: 20.0, 4: 30.0}, "auto": {1: 19.0, 4: 50.0}, "plain": {1: 10.0, 4: 60.0},
    })  # fmt: skip
    points = points_of(records, base_column(records))
    assert [(p.streams, p.column) for p in points[:3]] == [(1, "plain"), (1, "spec"), (1, "auto")]
    spec = points[1].over_base
    assert spec is not None and spec.value == pytest.approx(2.0)
    assert spec.high - spec.low == pytest.approx(0.0, abs=1e-9)  # what both share is no noise
    (crossing,) = [c for c in crossings(points) if c.column == "spec"]
    assert crossing.streams == pytest.approx(2.0 ** (2 * (2.0 - 1.0) / (2.0 - 0.5)))
    better = {streams: ratio.value for _, _, streams, ratio in over_better(records)}
    assert better == {1: pytest.approx(0.95), 4: pytest.approx(50 / 60)}
    text = markdown({"machine": "two cores"}, records)
    assert "| coding | spec | **19.9** | 29.9 |" in text
    assert "auto against the better fixed mode, total rate: 0.890 on average over 2 points" in text
    assert "+100.0 % [+100.0, +100.0]" in text
    assert markdown({}, []).startswith("Nothing to report")


def test_a_budget_gives_every_point_two_runs_and_the_cheap_ones_more() -> None:
    budget = Budget(limit_s=100.0, begun=0.0)
    assert budget.allows("coding", 250, now=500.0)
    budget.spent("coding", 250, 60.0)
    assert budget.allows("coding", 250, now=500.0)
    budget.spent("coding", 250, 60.0)
    assert not budget.allows("coding", 250, now=50.0)
    assert budget.allows("coding", 250, now=40.0)
    for _ in range(2):
        budget.spent("coding", 1, 2.0)
    assert budget.allows("coding", 1, now=97.0)
    assert not budget.allows("coding", 1, now=99.0)


def test_modes_are_settings_of_the_running_server() -> None:
    values = {mode: next(iter(mode_change(mode, 7).values())) for mode in ("plain", "spec", "toggle", "auto")}
    assert values == {"plain": 0, "spec": None, "toggle": 7, "auto": "auto"}


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
