"""What the flags of the mode mean for the executor and the scheduler. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from sglang.srt.managers.executor_settings import executor_args
from sglang.srt.managers.mode_args import auto_controller, check_mode, when_speculative
from sglang.srt.model_executor.step_plan import ExecutorInfo, GraphSet, SpecShape, StepCost
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.cost_table import CostTable
from sglang.srt.utils.flags import ServerArgsError

COSTS = tuple(StepCost(k, rows, 0.001 * (1 + 0.1 * k), 1e-9) for k in range(4) for rows in (1, 8))
INFO_SPEC = SpecShape(3)
INFO = ExecutorInfo(8, 100, 1, 64, 50, INFO_SPEC, 8, draft_lens=(1, 2, 3))


def resolved(line: str = "", device: str = "cpu") -> ServerArgs:
    words = f"--model-path m --device {device} --speculative-algorithm EAGLE3".split()
    words += ["--speculative-draft-model-path", "d", "--speculative-num-steps", "3"]
    args = ServerArgs.from_command_line([*words, *line.split()]).resolve(None)
    check_mode(args)
    return args


def table_file(path: Path, device: str = "cpu", shape: SpecShape = INFO_SPEC) -> Path:
    table = CostTable.from_costs(COSTS, padded=False)
    path.write_text(AutoTable(device, "m", "d", shape, table, {"greedy": (0.9, 0.8, 0.7)}).to_json())
    return path


AUTO = "--speculative-disable-bs-threshold auto"


@pytest.mark.parametrize(
    "line, sets",
    [
        ("", ()),
        ("--speculative-disable-bs-threshold 4", ()),
        (AUTO, ((1, None), (2, None), (3, None))),
        (f"{AUTO} --speculative-capture-max-bs 9", ((1, None), (2, None), (3, None))),
        ("--speculative-bs-schedule 1-4:3,5-16:1,17-:0", ((1, 16), (3, 4))),
        ("--speculative-bs-schedule 1-4:3,5-:1", ((1, None), (3, 4))),
        ("--speculative-bs-schedule 1-4:3,5-:0 --speculative-capture-max-bs 9", ((3, None),)),
        ("--speculative-bs-schedule 1-:0", ()),
    ],
)
def test_what_is_captured(line: str, sets: tuple[tuple[int, int | None], ...]) -> None:
    assert executor_args(resolved(line, "cuda")).spec_rows == sets
    assert executor_args(resolved(line)).spec_rows == (), "on a CPU there is nothing to capture"


def test_costs_are_measured_for_auto_alone(tmp_path: Path) -> None:
    table = table_file(tmp_path / "t.json")
    for line, measures in (
        ("", False), ("--speculative-bs-schedule 1-:2", False), (AUTO, True),
        (f"{AUTO} --speculative-auto-table {table}", False),
    ):  # fmt: skip
        assert executor_args(resolved(line)).measure_costs == measures


def test_rows_have_draft_lengths_of_their_own_under_auto_alone(tmp_path: Path) -> None:
    table = CostTable.from_costs([*COSTS, StepCost(3, 8, 0.001, 1e-9, 20)], padded=True)
    (tmp_path / "own.json").write_text(AutoTable("d", "m", "d", INFO_SPEC, table, {}).to_json())
    for line, wanted in (
        ("", False), ("--speculative-bs-schedule 1-:2", False), (AUTO, True),
        (f"{AUTO} --speculative-auto-table {table_file(tmp_path / 't.json')}", False),
        (f"{AUTO} --speculative-auto-table {tmp_path / 'own.json'}", True),
    ):  # fmt: skip
        assert executor_args(resolved(line, "cuda")).ragged_steps == wanted
        assert not executor_args(resolved(line)).ragged_steps, "on a CPU there is nothing to capture"
    graphs = (GraphSet(0, (8,), 0.0, 0), GraphSet(3, (8,), 0.0, 0, ((8, 20),)))
    told = [auto_controller(resolved(AUTO), replace(INFO, costs=COSTS, graphs=sets)) for sets in ((), graphs)]
    assert [auto is not None and auto.tells_rows_apart for auto in told] == [False, True]


@pytest.mark.parametrize(
    "line, words",
    [
        ("--speculative-bs-schedule 1-4:3", "must have no end; write for example 1-4:5"),
        ("--speculative-bs-schedule often", "'often' is no range: write FIRST-LAST:DRAFTS"),
        ("--speculative-bs-schedule 1-:5", "names 5 drafts, and --speculative-num-steps is 3: raise that"),
        (
            "--speculative-bs-schedule 1-64:2,65-:0 --speculative-capture-max-bs 32",
            "with up to 64 requests: raise --speculative-capture-max-bs 32 to at least that",
        ),
        (f"{AUTO} --speculative-auto-table nowhere.json", "nowhere.json can't be read"),
    ],
)
def test_refusals_are_one_line(line: str, words: str) -> None:
    with pytest.raises(ServerArgsError, match=words) as caught:
        resolved(line)
    assert "\n" not in str(caught.value)


def test_tables_that_can_not_be_used(tmp_path: Path) -> None:
    other = table_file(tmp_path / "other.json", shape=SpecShape(2, 4, 8))
    broken, binary = tmp_path / "broken.json", tmp_path / "binary.json"
    broken.write_text('{"version": 1}')
    binary.write_bytes(b"\xff\xfe\xff")
    for file, words in (
        (
            other,
            "is for 2 steps, topk 4, 8 draft tokens, and this server has 3 steps, topk 1, 4 draft tokens",
        ),
        (broken, r"'device' must be a string, got None \(python -m sglang.tune_spec --save makes one\)"),
        (binary, "can't be read"),
        (tmp_path, "can't be read"),
    ):
        with pytest.raises(ServerArgsError, match=words):
            resolved(f"--speculative-auto-table {file}")


def test_what_auto_begins_with(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert auto_controller(resolved(), INFO) is None, "nothing is known of costs"
    assert auto_controller(resolved(), replace(INFO, spec=None, costs=COSTS)) is None
    state = AutoInput(8, (("greedy", 8),), 100, 3, (1, 2, 3), (1, 2, 3))
    dear = tuple(replace(cost, fixed_s=1.0) if cost.draft_len else cost for cost in COSTS)
    measured = auto_controller(resolved(AUTO), replace(INFO, costs=dear))
    assert measured is not None and measured.decide(state).draft_len == 0
    args = resolved(f"{AUTO} --speculative-auto-table {table_file(tmp_path / 't.json')}")
    read = auto_controller(args, INFO)
    assert read is not None and not caplog.records
    assert read.decide(state).draft_len > 0, "most drafts are accepted, and they cost little"
    args = resolved(f"{AUTO} --speculative-auto-table {table_file(tmp_path / 'u.json', 'NVIDIA H200')}")
    assert auto_controller(args, INFO) is not None
    assert "was measured on NVIDIA H200, and this is cpu" in caplog.text


def test_what_is_logged_of_it() -> None:
    assert when_speculative(resolved()) == "always"
    assert (
        when_speculative(resolved("--speculative-disable-bs-threshold 4"))
        == "while at most 4 requests decode"
    )
    assert when_speculative(resolved(AUTO)).startswith("as measured costs")
    assert when_speculative(resolved("--speculative-bs-schedule 1-:2")) == "by the schedule 1-:2"
