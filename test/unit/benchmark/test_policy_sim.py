"""The policy simulator: its cost structure, its accounting, its policies, and ragged allocation."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.policy_sim import best_lengths, make_table, ragged, simulate, tables
from benchmark.policy_sim.engine import Result, Simulation, Truth
from benchmark.policy_sim.policies import Auto, Outcome, Policy, Threshold, View, best_schedule
from benchmark.policy_sim.published import AcceptanceAverage, Exp3, Goodput, Ucb
from benchmark.policy_sim.structure import (
    StepStructure,
    StructureError,
    line,
    structure_of,
    timed,
    with_ragged,
)
from benchmark.policy_sim.workload import (
    RECIPES,
    Workload,
    chances,
    first_chance,
    make_workload,
    request_chance,
    tokens_of,
)
from sglang.srt.model_executor.step_plan import SpecShape, StepCost
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.cost_table import CostTable

ROOT = Path(__file__).resolve().parents[3]
STRUCTURE = StepStructure(
    verify=((1.0, 4e-3), (64.0, 4.6e-3), (128.0, 5e-3), (256.0, 6.7e-3), (512.0, 11e-3)),
    draft=((1.0, 2.4e-4), (64.0, 5.5e-4)),
    per_kv_token_s=3.2e-8,
)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
COSTS = [StepCost(k, n, STRUCTURE.fixed_s(k, n), STRUCTURE.per_kv_token_s) for k in range(4) for n in SIZES]
TABLE = CostTable.from_costs(COSTS, padded=True)


def test_lines_go_through_points_and_on() -> None:
    points = ((1.0, 2.0), (3.0, 6.0), (5.0, 7.0))
    assert [line(points, x) for x in (0.5, 1, 2, 3, 4, 5, 7)] == [2, 2, 4, 6, 6.5, 7, 8]


@pytest.mark.parametrize("lengths", [(0, 3), (0, 1), (0, 1, 2, 3)])
def test_a_structure_is_found_again_in_its_costs(lengths: tuple[int, ...]) -> None:
    told = [cost for cost in COSTS if cost.draft_len in lengths]
    found = structure_of(told)
    assert found.per_kv_token_s == pytest.approx(STRUCTURE.per_kv_token_s)
    for cost in told:
        assert found.fixed_s(cost.draft_len, cost.rows) == pytest.approx(cost.fixed_s, rel=1e-6)
    for k, n in itertools.product(range(4), SIZES[:5]):
        assert found.fixed_s(k, n) == pytest.approx(STRUCTURE.fixed_s(k, n), rel=0.02)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000))
def test_a_draft_forward_never_gets_cheaper_with_rows(seed: int) -> None:
    source = np.random.default_rng(seed)
    costs = [replace(cost, fixed_s=cost.fixed_s * source.uniform(0.8, 1.2)) for cost in COSTS]
    (_, few), (_, many) = structure_of(costs).draft
    assert 0.0 <= few <= many


def test_what_has_no_structure() -> None:
    with pytest.raises(StructureError, match="plain steps and of speculative"):
        structure_of([cost for cost in COSTS if cost.draft_len == 0])
    with pytest.raises(StructureError, match="same number of query tokens"):
        structure_of([StepCost(0, 1, 1.0, 0.0), StepCost(3, 1, 2.0, 0.0)])


@settings(max_examples=30, deadline=None)
@given(st.sets(st.integers(1, 200), min_size=2), st.integers(0, 1000))
def test_sizes_on_straight_lines_between_others_were_not_timed(rows: set[int], seed: int) -> None:
    source = np.random.default_rng(seed)
    kept = [StepCost(1, n, source.uniform(1, 2), 0.0) for n in sorted(rows)]
    points = tuple((float(cost.rows), cost.fixed_s) for cost in kept)
    missing = [n for n in range(min(rows), max(rows)) if n not in rows]
    between = [StepCost(1, n, line(points, n), 0.0) for n in missing]
    assert timed([*between, *kept]) == kept


# ---- the table of a study -------------------------------------------------------------------------

STUDY = ROOT / "docs/data/h200/auto_study.jsonl"


def _study(costs: list[StepCost], segments: list[dict[str, Any]]) -> list[dict[str, Any]]:
    info = {"costs": [asdict(cost) for cost in costs], "graphs": [{}]}
    return [{"kind": "start", "device": "d", "shape": [3, 1, 4], "info": info}, *segments]


def _segment(length: int, streams: int, seconds: float, **changes: Any) -> dict[str, Any]:
    steps = {"steps": {str(length): 10}, "device_s": 10 * seconds, "eager_steps": 0}
    return {"kind": "segment", "streams": streams, "context": 9, "kv_tokens": 500} | steps | changes


def test_the_kept_table_is_what_the_server_of_the_study_measured() -> None:
    lines = [json.loads(text) for text in STUDY.read_text().splitlines()]
    made = make_table.measured(lines, STUDY.name)
    assert made == AutoTable.from_json((ROOT / "docs/data/h200/auto_table.json").read_text())
    assert made.table.to_dict()["costs"] == lines[0]["info"]["costs"]
    shown = (ROOT / "docs/policy_regret.md").read_text().splitlines()
    printed = make_table.markdown(make_table.agreement(lines, made.table))
    assert [text for text in printed if text not in shown] == []


def test_a_study_without_costs() -> None:
    with pytest.raises(make_table.StudyError, match=r"x has no start with step costs.*auto_study\.py"):
        make_table.measured(_study([], []), "x")


def test_steps_of_one_length_are_held_against_the_table() -> None:
    said = TABLE.seconds(3, 20, 500)
    segments = [
        *(_segment(3, 20, said * (1 + off)) for off in (0.1, 0.2, 0.9)),
        _segment(3, 20, 9.0, eager_steps=1),  # no step of a graph
        _segment(3, 20, 9.0, steps={"0": 5, "3": 5}),  # which step took how long?
    ]
    found = make_table.agreement(_study(COSTS, segments), TABLE)
    assert found == {(9, 3, 20): pytest.approx(0.2)}
    assert make_table.markdown(found)[2:] == ["| 9 | 3 | +20 |"]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000))
def test_times_made_rising(seed: int) -> None:
    """They rise, keep their sum, and stay as they are where nothing fell."""
    source = np.random.default_rng(seed)
    costs = [replace(cost, fixed_s=cost.fixed_s * source.uniform(0.7, 1.3)) for cost in COSTS]
    made = make_table.retimed(_auto_table(CostTable.from_costs(costs, padded=True)), make_table.RISING)
    for k in range(4):
        before = [cost.fixed_s for cost in costs if cost.draft_len == k]
        after = [cost.fixed_s for cost in made.table.costs if cost.draft_len == k]
        assert after == sorted(after)
        assert sum(after) == pytest.approx(sum(before))
        assert (before == sorted(before)) == (after == before)
    steady = make_table.retimed(_auto_table(TABLE), make_table.RISING)
    assert steady.table == TABLE


def test_times_made_of_a_structure_keep_those_that_have_one() -> None:
    made = make_table.retimed(_auto_table(TABLE), make_table.STRUCTURE)
    for cost in COSTS:
        assert made.table.seconds(cost.draft_len, cost.rows, 7) == pytest.approx(cost.fixed_s, rel=1e-4)


def test_make_table_writes_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = _study(COSTS, [_segment(1, 8, 1.0)])
    (tmp_path / "study.jsonl").write_text("\n".join(map(json.dumps, lines)))
    args = ["--study", str(tmp_path / "study.jsonl"), "--out", str(tmp_path / "t.json")]
    for times in make_table.TIMES:
        make_table.main([*args, "--times", times])
        assert AutoTable.from_json((tmp_path / "t.json").read_text()).shape == SpecShape(3)
        assert "| 9 | 1 | +" in capsys.readouterr().out


@settings(max_examples=30, deadline=None)
@given(st.floats(1.05, 3.5), st.floats(-2, 2))
def test_chances_give_the_length_asked_for(length: float, offset: float) -> None:
    first = first_chance(length)
    assert tokens_of(chances(first, 3)) == pytest.approx(length, abs=1e-6)
    assert abs(offset) < 1e-9 or (request_chance(first, offset) > first) == (offset > 0)


def _run(policy: Policy, workload: Workload, seed: int = 0) -> Result:
    return Simulation(workload, Truth(TABLE, workload, 3), policy, seed).run()


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_load_is_served_to_the_last_token(name: str) -> None:
    workload = make_workload(name, seed=1, seconds=1.0)
    result = _run(Auto(TABLE, 3), workload)
    assert result.num_tokens == sum(request.output_len for request in workload.requests)
    assert 0.0 <= result.regret < 0.2
    assert result.end_s >= workload.requests[-1].second
    assert 0 < result.mean_latency_s <= result.end_s
    assert _run(Auto(TABLE, 3), workload) == result  # nothing but the seed decides


def test_regret_is_against_the_best_choice_at_every_step() -> None:
    """One size, chances and context: the regret of each fixed length follows from the table alone."""
    workload = replace(make_workload("poisson", 0, 0.5), noise=0.0)
    one = replace(workload.requests[0], offset=0.0, prompt_len=1, output_len=2000, second=0.0)
    workload = replace(workload, requests=(one,))
    parts = chances(first_chance(2.0), 3)
    tokens = [tokens_of(parts[:k]) for k in range(4)]
    rates = [tokens[k] / TABLE.seconds(k, 1, 1000) for k in range(4)]
    for k in range(4):
        result = _run(Threshold(None, k) if k else Threshold(0, 3), workload)
        assert result.regret == pytest.approx(1 - rates[k] / max(rates), abs=2e-3)
        assert set(result.num_steps) == {k}
        given_tokens = (result.num_tokens - 1) / result.num_steps[k]
        assert given_tokens == pytest.approx(tokens[k], rel=0.05)


def test_a_schedule_made_from_the_table_beats_fixed_lengths() -> None:
    parts = chances(first_chance(2.0), 3)
    schedule = best_schedule(TABLE, parts, 640, 256)
    for rows in SIZES:
        rates = [tokens_of(parts[:k]) / TABLE.seconds(k, rows, 640 * rows) for k in range(4)]
        assert rates[schedule.draft_len(rows)] == max(rates)


VIEW = View(num_rows=8, class_counts=(("a", 8.0),), kv_tokens=8000, draft_lens=(1, 2, 3))


def _drive(policy: Policy, part: float, num_steps: int) -> list[int]:
    source = np.random.default_rng(0)
    chosen = []
    for _ in range(num_steps):
        k = policy.choose(VIEW)
        chosen.append(k)
        accepted = np.logical_and.accumulate(source.random((8, k)) < part, axis=1).sum(axis=1)
        seconds = TABLE.seconds(k, 8, 8000)
        policy.observe(Outcome(k, 8, 8000, seconds, accepted, np.zeros(8, np.int64), ("a",)))
    return chosen


@pytest.mark.parametrize(
    ("policy", "low", "high"),
    [
        (AcceptanceAverage((1, 2, 3), 3), 1, 3),
        (Goodput(TABLE), 0, 3),
        (Auto(TABLE, 3), 0, 3),
    ],
)
def test_policies_follow_acceptance(policy: Policy, low: int, high: int) -> None:
    assert _drive(policy, 0.95, 200)[-100:].count(high) >= 90
    assert _drive(policy, 0.01, 600)[-100:].count(low) >= 80


def test_goodput_that_stopped_stays_stopped_and_bandits_do_not() -> None:
    goodput = Goodput(TABLE)
    _drive(goodput, 0.01, 300)
    assert set(_drive(goodput, 0.95, 300)) == {0}
    for bandit in (Ucb(TABLE, by_size=False), Ucb(TABLE, by_size=True), Exp3(TABLE, 0)):
        chosen = _drive(bandit, 0.95, 3000)
        assert set(chosen) == {0, 1, 2, 3}
        assert chosen[-1000:].count(3) > chosen[-1000:].count(0)


def test_outcomes_are_counted_by_depth_and_class() -> None:
    outcome = Outcome(3, 4, 0, 1.0, np.array([3, 0, 1, 2]), np.array([0, 0, 1, 1]), ("a", "b"))
    assert outcome.correct_by_depth() == (3, 2, 1)
    assert outcome.correct_by_depth(0) == (1, 1, 1)
    assert outcome.correct_by_depth(1) == (2, 1, 0)


def test_best_lengths_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_table(tmp_path / "table.json")
    best_lengths.main(["--costs", str(tmp_path / "table.json"), "--lengths", "1.05", "3.5", "--kv", "1000"])
    low, high = capsys.readouterr().out.splitlines()[-2:]
    assert low.split(" | ")[2] == "0" and high.split(" | ")[2] == "3"
    length, gain = best_lengths.best(TABLE, 2.0, 256, 1000)
    parts = chances(first_chance(2.0), 3)
    rates = [tokens_of(parts[:k]) / TABLE.seconds(k, 256, 256_000) for k in range(4)]
    assert rates[length] == max(rates)
    assert gain == pytest.approx(max(rates) / max(rates[0], rates[3]) - 1)


# ---- ragged ---------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4), st.integers(1, 40))
def test_the_ragged_allocation_is_the_best_of_all(firsts: list[float], scale: int) -> None:
    """Against every allocation there is, for verification as dear as that of ``scale`` times the rows."""
    rows = len(firsts)
    steep = replace(STRUCTURE, verify=tuple((x / scale, y) for x, y in STRUCTURE.verify))
    costs = ragged.Costs(steep, rows, 100.0, 3, pad=False)
    reached = np.cumprod([chances(first, 3) for first in firsts], axis=1)

    def rate(lengths: Any) -> float:
        tokens = rows + sum(reached[row, :k].sum() for row, k in enumerate(lengths))
        return float(tokens / costs.seconds(max(lengths), sum(lengths)))

    best = max(rate(lengths) for lengths in itertools.product(range(4), repeat=rows))
    assert rate(costs.ragged(reached)) == pytest.approx(best)
    common = costs.common(reached)
    assert rate([common] * rows) == pytest.approx(max(rate([k] * rows) for k in range(4)))


def test_requests_that_differ_gain_by_draft_lengths_of_their_own() -> None:
    """And those that are alike lose nothing. Requests are told apart by what they accepted alone."""
    own = with_ragged(TABLE)
    assert {cost.rows for cost in own.ragged} == {32, 64, 128, 256} and own.costs == TABLE.costs
    gains = {}
    for name in ("halves-busy", "alike-busy"):
        workload = make_workload(name, 0, 4.0)
        truth = Truth(own, workload, 3)
        one, rows = (
            Simulation(workload, truth, Auto(table, 3, num_slots=slots), 0).run()
            for table, slots in ((TABLE, 0), (own, 256))
        )
        assert one.num_tokens == rows.num_tokens and one.num_ragged == 0
        gains[name] = one.regret - rows.regret
        assert rows.num_ragged > 0 or name == "alike-busy"
    assert gains["halves-busy"] > 0.01 and gains["alike-busy"] > -0.005, gains


def _auto_table(table: CostTable) -> AutoTable:
    return AutoTable("cpu", "m", "d", SpecShape(3), table)


def _write_table(path: Path) -> None:
    path.write_text(_auto_table(TABLE).to_json())


def test_ragged_runs_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_table(tmp_path / "table.json")
    args = ["--costs", str(tmp_path / "table.json"), "--out", str(tmp_path / "out.jsonl"), "--quiet"]
    ragged.main([*args, "--streams", "16", "--kv", "1000", "--draws", "5", "--steps", "50"])
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(lines) == len(ragged.MIXES)
    assert all(line["bound"] >= -1e-9 and abs(line["estimated"]) < 0.5 for line in lines)
    assert "| 2.5 and 1.2 | 1000 |" in capsys.readouterr().out


def test_simulate_runs_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_table(tmp_path / "table.json")
    trace = tmp_path / "few.jsonl"
    trace.write_text('{"second": 0, "output_len": 20}\n{"second": 0.1, "output_len": 30, "prompt_len": 9}\n')
    args = ["--costs", str(tmp_path / "table.json"), "--out", str(tmp_path / "out.jsonl"), "--quiet"]
    simulate.main([*args, "--trace", "poisson-light", str(trace), "--seconds", "0.2", "--seeds", "1"])
    lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {line["trace"] for line in lines} == {"poisson-light", "few"}
    assert len(lines) == 2 * len(simulate.policies(TABLE, 3))
    shown = capsys.readouterr().out
    for words in ("| auto |", "| goodput |", "best one threshold", "best threshold of each trace"):
        assert words in shown


def test_steps_take_what_the_truth_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _write_table(tmp_path / "told.json")
    slow = [replace(c, fixed_s=c.fixed_s * (50 if c.draft_len else 1)) for c in COSTS]
    (tmp_path / "true.json").write_text(_auto_table(CostTable.from_costs(slow, padded=True)).to_json())
    args = ["--costs", str(tmp_path / "told.json"), "--out", str(tmp_path / "out.jsonl"), "--quiet"]
    args += ["--trace", "poisson-light", "--policy", "plain", "always 3", "--seconds", "0.2", "--seeds", "1"]
    regrets = []
    for truth in ([], ["--truth", str(tmp_path / "true.json")]):
        simulate.main([*args, *truth])
        lines = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
        regrets.append({line["policy"]: line["regret"] for line in lines})
    assert regrets[0]["always 3"] == pytest.approx(0, abs=0.1) and regrets[0]["plain"] > 0.2
    assert regrets[1]["plain"] == 0 and regrets[1]["always 3"] > 0.9
    plain = CostTable.from_costs(COSTS[: len(SIZES)], padded=True)
    (tmp_path / "true.json").write_text(_auto_table(plain).to_json())
    with pytest.raises(SystemExit, match="draft lengths"):
        simulate.main([*args, "--truth", str(tmp_path / "true.json")])
    capsys.readouterr()


def test_flags_that_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (simulate.main, ragged.main):
        with pytest.raises(SystemExit):
            main([])
        assert "--costs and --out" in capsys.readouterr().err


def test_the_document_shows_what_the_commands_print() -> None:
    shown = (ROOT / "docs/policy_regret.md").read_text().splitlines()
    data = ROOT / "docs/data/h200"
    regrets = [json.loads(text) for text in (data / "policy_regret.jsonl").read_text().splitlines()]
    own = [json.loads(text) for text in (data / "ragged_regret.jsonl").read_text().splitlines()]
    gains = [json.loads(text) for text in (data / "ragged_gain.jsonl").read_text().splitlines()]
    table = AutoTable.from_json((data / "auto_table.json").read_text()).table
    printed = [
        *tables.markdown(regrets),
        *tables.markdown(own),
        *ragged.markdown(gains),
        *best_lengths.markdown(table, [1.3, 1.5, 2.0, 2.5], [1024, 16384]),
    ]
    assert [text for text in printed if text not in shown] == []
    assert {line["trace"] for line in regrets} == set(RECIPES)
    assert {line["policy"] for line in own} == {"auto", simulate.OWN}
