"""The study of `auto`: its parts in their small form on the CPU, and what its tables are made of."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.server import server_environment, write_tiny_pair
from helpers.timed_executor import TimedExecutor, h200_costs
from helpers.tiny_executor import tiny_executor
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.h200 import auto_study, burst
from benchmark.h200.auto_points import AUTO, Point, PointRunner, Sizes, made_up_prompts, real_prompts, turns
from benchmark.h200.auto_tables import (
    crossover,
    expected_tokens,
    points,
    pooled_survival,
    start_lines,
    summary,
)
from benchmark.h200.burst_stats import Gap, gaps, near_switch_ratio, p99
from benchmark.h200.executors import Records
from benchmark.h200.in_process import Clock, InProcess, StepRecord, fixed_modes, without_prefill
from benchmark.h200.shapes import write_shapes
from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.model_executor.step_plan import PrefillChunk, SlotAdmission, SlotSampling, StepKind, StepPlan
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.speculative.simulate import SimulatedAcceptance, SimulationSettings

ROOT = Path(__file__).resolve().parents[3]
MODES = {"plain", "k=1", "k=2", "always", "threshold", "auto"}


def _lines(file: Path, kind: str) -> list[dict[str, Any]]:
    return [x for x in map(json.loads, file.read_text().splitlines()) if x["kind"] == kind]


def test_all_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("SGLANG_SIMULATE_ACC_LEN", "SGLANG_SIMULATE_ACC_METHOD"):
        monkeypatch.setenv(name, "")  # put back afterwards: the script sets them
    file = tmp_path / "out.jsonl"
    flags = ["--tiny", "--device", "cpu", "--out", str(file), "--acceptances", "2.5", "--rounds", "1"]
    assert auto_study.main([*flags, "--streams", "1", "2", "--contexts", "16", "--threshold", "1"]) == 0
    segments = _lines(file, "segment")
    assert {(x["streams"], x["mode"]) for x in segments} == {(n, mode) for n in (1, 2) for mode in MODES}
    drafts = {"plain": {"0"}, "k=1": {"1"}, "k=2": {"2"}, "always": {"3"}}
    for line in segments:
        one_row = {"threshold": {"3"} if line["streams"] == 1 else {"0"}, "auto": {*"0123"}}
        assert set(line["steps"]) <= (drafts | one_row)[line["mode"]]
        for k, counts in line["accepted"].items():
            assert len(counts) == int(k) + 1 and sum(counts) == line["steps"][k] * line["streams"]
        assert line["seconds"] > 0 and line["tokens"] >= sum(line["steps"].values()) * line["streams"]
    assert [x["round"] for x in segments if x["mode"] == "auto"].count("first") == 2
    for line in _lines(file, "edge"):
        assert line["threshold"] == 2 and line["prefill_steps"] > 0 and max(map(int, line["rows"])) >= 2
    bursts = {x["mode"]: x for x in _lines(file, "burst")}
    assert set(bursts) == {"plain", "always", "threshold", "auto"}
    assert len({x["tokens"] for x in bursts.values()}) == 1 and bursts["threshold"]["switches"] > 0
    for line in bursts.values():
        # A step may put out more than a request still wanted.
        assert sum(second["tokens"] for second in line["by_second"]) >= line["tokens"]
        assert line["busy_s"] <= line["wall_s"] * 1.01
    printed = capsys.readouterr().out
    assert auto_study.main(["--table", str(file)]) == 0
    again = capsys.readouterr().out
    assert again in printed and again.count("###") == 3
    picture = tmp_path / "burst.png"
    assert burst.main(["--plot", str(file), "--picture", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_model_of_the_users_with_its_own_drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "-1")
    target, drafter = write_tiny_pair(tmp_path)
    prompts, file = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    rows = [{"id": f"p{i}", "domain": "tool", "text": f"say {i} twice"} for i in range(3)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--tiny", "--device", "cpu", "--model-path", str(target), "--draft-model-path", str(drafter)]
    flags += ["--prompts", str(prompts), "--out", str(file), "--parts", "points", "--streams", "2"]
    assert auto_study.main([*flags, "--rounds", "1"]) == 0
    segments = _lines(file, "segment")
    assert {x["mode"] for x in segments} == MODES and {x["acceptance"] for x in segments} == {None}
    # The same prompts anew: a mode that comes again decodes the same text, and so accepts the same.
    always = [x["accepted"] for x in segments if x["mode"] in ("always", "threshold")]
    assert always[0] == always[1]


ABSENT = ("fastapi", "uvicorn", "starlette", "pydantic", "zmq", "httpx", "gguf", "jinja2", "matplotlib")
WITHOUT_SERVER = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Absent())
import sglang.tune_spec
from benchmark.h200 import auto_study, burst
"""


def test_a_machine_without_the_servers_packages_will_do(tmp_path: Path) -> None:
    """msgspec alone is needed: requests are its structs."""
    env = server_environment(tmp_path)
    env["PYTHONPATH"] = f"{env.get('PYTHONPATH', '')}:{ROOT}"
    done = subprocess.run([sys.executable, "-c", WITHOUT_SERVER], capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr


def test_the_gpus_flags_are_flags_of_the_server(tmp_path: Path) -> None:
    """All draft lengths are captured, and steps are timed at the start."""
    args = auto_study.parse(["--device", "cuda"])
    folders = write_shapes(tmp_path, False)
    wanted = auto_study.wanted_of(args, auto_study.MADE_UP, folders, tmp_path / "choices.json")
    given = ServerArgs.from_command_line(wanted.flags()).resolve("LlamaForCausalLM")
    built = executor_args(given)
    assert [k for k, _ in built.spec_rows] == [1, 2, 3] and built.measure_costs
    assert built.max_running_requests == built.capture_max_bs == built.cuda_graph_max_bs == 256
    assert built.context_length == 16384 + auto_study.ROOM


@pytest.fixture(scope="module")
def engine() -> InProcess:
    return InProcess(tiny_executor((3, 1, 4), max_running_requests=4, max_total_tokens=400))


def test_a_point_that_does_not_fit_is_left_out(engine: InProcess) -> None:
    out = Records(None, "cpu")
    sizes = Sizes((2,), (10**4,), 1, 0.0, 1, 2, 2, 1.0, 0, 0.0)
    runner = PointRunner(engine, sizes, 1, made_up_prompts(256), None, out)
    runner.run(Point(None, 10**4, 2))
    assert [line["kind"] for line in out.lines] == ["left_out"]


def test_what_a_fixed_mode_is_called(engine: InProcess) -> None:
    assert [mode.name for mode in fixed_modes(3)] == ["plain", "k=1", "k=2", "always"]
    with pytest.raises(AssertionError, match="mode auto"):  # of an executor that measured nothing
        engine.set_mode(AUTO)


@given(st.integers(0, 40))
def test_every_mode_has_its_turn(number: int) -> None:
    modes = [*fixed_modes(3), AUTO]
    assert sorted(m.name for m in turns(modes, number)) == sorted(m.name for m in modes)


def test_prompts_go_round() -> None:
    assert real_prompts([[1], [2]])(Point(None, 0, 5)) == [[1], [2], [1], [2], [1]]


def test_only_the_last_token_of_a_prompt_is_left() -> None:
    chunks = (PrefillChunk(3, 0, (5, 6, 7), None), PrefillChunk(4, 0, (8,), None))
    admissions = tuple(SlotAdmission(c.slot, len(c.token_ids), 0, SlotSampling()) for c in chunks)
    plan = StepPlan(1, StepKind.PREFILL, prefill=chunks, admissions=admissions)
    short = without_prefill(plan)
    assert short.prefill == (PrefillChunk(3, 2, (7,), None), PrefillChunk(4, 0, (8,), None))
    assert [a.cached_len for a in short.admissions] == [2, 0]
    decode = StepPlan(2, StepKind.DECODE, (3,), (4,))
    assert without_prefill(decode) is decode
    first = replace(plan, prefill=(PrefillChunk(3, 0, (5, 6), 7),))
    with pytest.raises(AssertionError, match="not chunked"):
        without_prefill(first)


@pytest.mark.parametrize("streams,best", [(2, "k=2"), (64, "k=1")])
def test_on_a_clock_of_its_own(streams: int, best: str) -> None:
    """Steps take what a table says: rates are arithmetic, and auto must find the best length by itself."""
    simulated = SimulatedAcceptance(SimulationSettings(1.5, "geometric"), 3, "cpu")
    costs, context = h200_costs(), 1024
    executor = TimedExecutor(costs, lambda: simulated.survival, 64, 90_000, 4096, noise=0.01)
    out = Records(None, "clock")
    sizes = Sizes((streams,), (context,), 2, 0.1, 6, 12, 50, 1.2, 3, 1.2)
    engine = InProcess(executor, clock=Clock(executor.clock, executor.sleep))
    PointRunner(engine, sizes, 32, made_up_prompts(256), simulated, out).run(Point(1.5, context, streams))
    (rates,) = points(out.lines).values()
    table = CostTable.from_costs(costs, padded=False)
    for k, mode in enumerate(("plain", "k=1", "k=2", "always")):
        seconds = table.seconds(k, streams, streams * context)
        expected = streams * (1 + sum(simulated.survival[:k])) / seconds
        assert rates.by_mode[mode] == pytest.approx(expected, rel=0.03)
    assert rates.best == best and rates.ratio("auto", best) > 0.97 and rates.ratio("auto", rates.better) > 1
    held = "always" if streams < 32 else "plain"
    assert rates.by_mode["threshold"] == pytest.approx(rates.by_mode[held], rel=0.03)


# ---- tables ------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 50), min_size=2, max_size=4), min_size=1, max_size=6))
def test_pooled_survival_of_one_length_gives_its_mean(histograms: list[list[int]]) -> None:
    longest = max(map(len, histograms))
    of_longest = [h for h in histograms if len(h) == longest]
    lines = [{"accepted": {str(len(h) - 1): h}} for h in of_longest]
    rows = sum(map(sum, of_longest))
    tokens = sum(n * (taken + 1) for h in of_longest for taken, n in enumerate(h))
    assert expected_tokens(pooled_survival(lines))[longest - 1] == pytest.approx(tokens / rows)
    parts = pooled_survival([{"accepted": {str(len(h) - 1): h}} for h in histograms])
    assert all(0 <= p <= 1 for p in parts) and len(parts) == longest - 1


def _point(streams: int, seconds: dict[str, tuple[int, float]]) -> list[dict[str, Any]]:
    """mode -> drafts, seconds of ten steps; two rounds, the second at half the speed."""
    lines = []
    for number in (1, 2):
        for mode, (k, time) in seconds.items():
            counts = {str(k): [10 * streams] + [0] * k}
            lines.append(
                {
                    "kind": "segment", "acceptance": 2.0, "context": 8, "streams": streams, "mode": mode,
                    "round": str(number), "seconds": time * number, "accepted": counts, "steps": {str(k): 10},
                }
            )  # fmt: skip
    return lines


def test_rates_ratios_and_the_crossover() -> None:
    survival = {"kind": "survival", "acceptance": 2.0, "by_depth": [0.6, 0.4]}
    few = {"plain": (0, 1.0), "k=1": (1, 1.0), "always": (2, 1.25), "threshold": (2, 1.25), "auto": (1, 1.0)}
    many = {"plain": (0, 1.0), "k=1": (1, 2.0), "always": (2, 4.0), "threshold": (0, 1.0), "auto": (0, 1.0)}
    lines = [survival, *_point(4, few), *_point(12, many)]
    found = points(lines)
    at_4 = found[2.0, 8, 4]
    assert at_4.by_mode["k=1"] == pytest.approx((4 * 10 * 1.6 + 4 * 10 * 1.6 / 2) / 2)
    assert (at_4.better, at_4.best) == ("always", "k=1") and found[2.0, 8, 12].better == "plain"
    assert at_4.ratio("auto", "always") == pytest.approx(1.6 / (2 / 1.25))
    assert at_4.share == {"1": 1.0}
    # Always over plain: 1.6 at 4, 0.5 at 12.
    assert crossover(lines, 2.0, 8) == round(4 + 8 * 0.6 / 1.1)
    assert crossover(lines, 2.5, 8) is None and crossover(lines[:11], 2.0, 8) is None
    text = summary(found)
    assert "lowest 1.000" in text[0] and "held" in text[0] and "MISSED" not in text[0]
    slow = points([survival, *_point(4, few | {"auto": (1, 1.1)}), *_point(12, many)])
    assert "1 below 0.98: acceptance 2, context 8, 4 streams" in summary(slow)[0]


def test_what_the_start_took() -> None:
    sets = [{"draft_len": k, "sizes": [1, 2], "seconds": 1.5, "bytes": 2**29} for k in (0, 1)]
    line = {"kind": "start", "note": "study", "seconds": 20.0, "info": {"graphs": sets, "costs": [{}] * 4}}
    assert start_lines([line]) == [
        "- Start (study): 20.0 s; CUDA graphs (0 drafts: 2, 1 drafts: 2) in 3.0 s and 1.00 GiB; 4 step costs."
    ]


# ---- bursts ------------------------------------------------------------------------------------


def _record(draft_len: int, rows: int = 4, gap_s: float = 1.0) -> StepRecord:
    kind = "decode" if rows else "prefill"
    return StepRecord("m", kind, draft_len, rows, 0, (), 0, 0.0, gap_s, 0.0, gap_s, None)


def test_gaps_count_from_the_switch_and_leave_out_what_follows_a_prefill() -> None:
    records = [_record(0), *[_record(0)] * 3, _record(3), *[_record(3)] * 25, _record(0, rows=0), _record(3)]
    found = gaps(records)
    assert [gap.is_near for gap in found] == [False] * 3 + [True] * 20 + [False] * 6
    assert len(gaps([_record(0, rows=0), _record(0)])) == 0


@given(st.floats(0.2, 5.0), st.floats(1.5, 4.0))
def test_steps_near_a_switch_beside_the_slower_mode(scale: float, slowdown: float) -> None:
    plain, always = [Gap(0, 4, 1.0, False)] * 50, [Gap(3, 4, scale, False)] * 50
    slower = max(1.0, scale)
    same = [Gap(0, 4, 1.0, True), Gap(3, 4, scale, True), Gap(0, 9, 99.0, True)]
    result = near_switch_ratio(same, [plain, always])
    assert result is not None and result[0] == pytest.approx(1.0) and result[1] == 2
    result = near_switch_ratio([Gap(0, 4, slower * slowdown, True)], [plain, always])
    assert result is not None and result[0] == pytest.approx(slowdown)
    assert near_switch_ratio([Gap(0, 4, 1.0, False)], [plain, always]) is None


@given(st.lists(st.floats(0, 1), min_size=1, max_size=300))
def test_p99(values: list[float]) -> None:
    found = p99(values)
    assert found in values and sum(value <= found for value in values) >= 0.99 * len(values)
    assert sum(value < found for value in values) < 0.99 * len(values)
