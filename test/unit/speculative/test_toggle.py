"""The toggle policy, by tables."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import pytest

import sglang.srt.speculative.toggle as toggle
from sglang.srt.speculative.toggle import (
    Decision,
    Reason,
    SwitchCounter,
    ThresholdError,
    ToggleInput,
    check_threshold,
    decide_by_threshold,
)

STATE = ToggleInput(
    num_decoding=4, threshold=4, max_spec_rows=16, num_steps=3, num_capped_rows=0, spec_fits=True
)
SPEC = Decision(3, Reason.BATCH_SIZE)
TOO_MANY = Decision(0, Reason.BATCH_SIZE)


@pytest.mark.parametrize(
    ("threshold", "num_decoding", "expected"),
    [
        (4, 1, SPEC), (4, 4, SPEC), (4, 5, TOO_MANY),
        (1, 1, SPEC), (1, 2, TOO_MANY),
        (0, 1, TOO_MANY), (0, 16, TOO_MANY),
        (None, 1, SPEC), (None, 16, SPEC),
        (None, 17, TOO_MANY),  # no graphs of that size
        (20, 17, TOO_MANY),
    ],
)  # fmt: skip
def test_threshold(threshold: int | None, num_decoding: int, expected: Decision) -> None:
    state = replace(STATE, threshold=threshold, num_decoding=num_decoding)
    assert decide_by_threshold(state) == expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"num_steps": 0, "max_spec_rows": 0}, Decision(0, Reason.NO_DRAFTER)),
        ({"num_capped_rows": 4}, Decision(0, Reason.REQUEST)),
        ({"num_capped_rows": 3}, SPEC),  # a capped row counts, and rides along
        ({"spec_fits": False}, Decision(0, Reason.MEMORY)),
        ({"spec_fits": False, "num_decoding": 5}, TOO_MANY),
        ({"spec_fits": False, "num_capped_rows": 4}, Decision(0, Reason.REQUEST)),
    ],
)
def test_what_else_makes_a_step_plain(change: dict[str, int], expected: Decision) -> None:
    assert decide_by_threshold(replace(STATE, **change)) == expected


def test_switches_are_counted_with_their_reasons() -> None:
    counter = SwitchCounter()
    memory, request = Decision(0, Reason.MEMORY), Decision(0, Reason.REQUEST)
    story = [
        (TOO_MANY, 4, None),  # the first step is no change
        (TOO_MANY, 5, None),
        (SPEC, 5, ("spec", "batch_size")),
        (Decision(1, Reason.BATCH_SIZE), 5, None),  # another draft length is no other mode
        (memory, 5, ("plain", "memory")),
        (SPEC, 5, ("spec", "memory")),
        (request, 8, ("plain", "request")),  # the change by hand is not what did it
        (SPEC, 8, ("spec", "request")),
        (TOO_MANY, 0, ("plain", "manual")),
        (SPEC, None, ("spec", "manual")),
    ]
    for decision, threshold, expected in story:
        assert counter.record(decision, threshold) == expected
    assert counter.total == 7
    assert counter.counts["spec", "manual"] == 1


@pytest.mark.parametrize("value", [0, 1, 16, None])
def test_thresholds_that_can_be_set(value: int | None) -> None:
    assert check_threshold(value, 16, has_drafter=True) == value


@pytest.mark.parametrize(
    ("value", "says"),
    [(-1, "-1"), (1.5, "1.5"), ("4", "'4'"), (True, "True"), ("auto", "'auto'"),
     (17, "at most 16"), ([], r"\[\]")],
)  # fmt: skip
def test_thresholds_that_cannot(value: object, says: str) -> None:
    with pytest.raises(ThresholdError, match=says):
        check_threshold(value, 16, has_drafter=True)


def test_a_threshold_needs_a_drafter() -> None:
    with pytest.raises(ThresholdError, match="--speculative-algorithm"):
        check_threshold(4, 0, has_drafter=False)


def test_it_imports_neither_torch_nor_a_clock() -> None:
    tree = ast.parse(Path(toggle.__file__).read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain_data = "sglang.srt.model_executor.step_plan"
    assert names == {"__future__", "collections.abc", "dataclasses", "enum", plain_data}


def test_a_probe_is_the_reason_of_its_switch_there_and_back() -> None:
    counter = SwitchCounter()
    plain, probe = Decision(0, Reason.COST), Decision(2, Reason.PROBE)
    switches = [counter.record(decision, None) for decision in (plain, probe, plain, plain)]
    assert switches == [None, ("spec", "probe"), ("plain", "probe"), None]
    assert counter.record(Decision(1, Reason.COST), None) == ("spec", "cost")
