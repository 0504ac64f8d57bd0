"""Cost tables: how they are read between and beyond measured sizes, as JSON, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.model_executor.step_plan import SpecShape, StepCost
from sglang.srt.speculative.auto_table import AutoTable
from sglang.srt.speculative.cost_table import CostTable, CostTableError

COSTS = [
    StepCost(0, 1, 0.010, 1e-6),
    StepCost(0, 4, 0.016, 1e-6),
    StepCost(0, 8, 0.032, 3e-6),
    StepCost(2, 1, 0.020, 2e-6),
    StepCost(2, 4, 0.050, 2e-6),
]
PADDED = CostTable.from_costs(COSTS, padded=True)
EAGER = CostTable.from_costs(COSTS, padded=False)


@pytest.mark.parametrize(
    ("table", "draft_len", "rows", "kv_tokens", "expected"),
    [
        (PADDED, 0, 1, 0, 0.010),
        (PADDED, 0, 2, 0, 0.016),  # a graph of 4 rows
        (PADDED, 0, 5, 1000, 0.035),
        (PADDED, 0, 12, 1000, 0.032 + 0.016 + 0.003),  # along the line through 4 and 8 rows
        (PADDED, 2, 3, 100, 0.0502),
        (EAGER, 0, 2, 0, 0.012),
        (EAGER, 0, 6, 1000, 0.024 + 0.002),
        (EAGER, 0, 4, 0, 0.016),
        (EAGER, 2, 6, 0, 0.070),
        (EAGER, 1, 1, 0, math.inf),  # not measured
        (PADDED, 3, 1, 0, math.inf),
    ],
)
def test_seconds(table: CostTable, draft_len: int, rows: int, kv_tokens: int, expected: float) -> None:
    assert table.seconds(draft_len, rows, kv_tokens) == pytest.approx(expected)


def test_one_size_is_scaled_by_rows() -> None:
    table = CostTable.from_costs([StepCost(0, 4, 0.01, 0.0)], padded=True)
    assert table.seconds(0, 2, 0) == pytest.approx(0.01)
    assert table.seconds(0, 8, 0) == pytest.approx(0.02)


def test_what_was_measured() -> None:
    assert PADDED.draft_lens == (0, 2)
    assert [PADDED.max_rows(k) for k in (0, 1, 2)] == [8, 0, 4]
    assert set(PADDED.costs) == set(COSTS)
    assert [PADDED.cell(0, n) for n in (1, 2, 4, 5, 8, 100)] == [0, 1, 1, 2, 2, 2]
    assert PADDED.cell(1, 1) is None


sizes = st.lists(st.integers(1, 300), min_size=1, max_size=6, unique=True)
times = st.floats(1e-4, 1.0)


@st.composite
def tables(draw: st.DrawFn) -> CostTable:
    lens = [0, *draw(st.lists(st.integers(1, 6), max_size=4, unique=True))]
    costs = [StepCost(k, n, draw(times), draw(st.floats(0, 1e-5))) for k in lens for n in draw(sizes)]
    return CostTable.from_costs(costs, draw(st.booleans()))


@settings(max_examples=40, deadline=None)
@given(tables(), st.integers(1, 1000), st.integers(0, 10**6))
def test_any_table_reads_as_it_was_measured_and_survives_json(
    table: CostTable, rows: int, kv_tokens: int
) -> None:
    again = CostTable.from_dict(json.loads(json.dumps(table.to_dict())))
    assert again == table
    for cost in table.costs:
        known = cost.fixed_s + cost.per_kv_token_s * kv_tokens
        assert table.seconds(cost.draft_len, cost.rows, kv_tokens) == pytest.approx(known)
    for k in table.draft_lens:
        seconds = table.seconds(k, rows, kv_tokens)
        assert 0 < seconds < math.inf
        assert seconds <= table.seconds(k, rows, kv_tokens + 1)
        curve = [c for c in table.costs if c.draft_len == k]
        if rows < max(c.rows for c in curve):
            assert seconds <= max(c.fixed_s for c in curve) + max(c.per_kv_token_s for c in curve) * kv_tokens


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "an object"),
        ({"padded": 1, "costs": []}, "'padded'"),
        ({"padded": True, "costs": []}, "'costs'"),
        ({"padded": True, "costs": "abc"}, "'costs'"),
        ({"padded": True, "costs": [{"draft_len": 0}]}, "cost 0 needs just the fields"),
        ({"padded": True, "costs": [dict(draft_len=0, rows=1.5, fixed_s=1, per_kv_token_s=0)]}, "rows"),
        ({"padded": True, "costs": [dict(draft_len=0, rows=0, fixed_s=1, per_kv_token_s=0)]}, "at least 1"),
        ({"padded": True, "costs": [dict(draft_len=0, rows=1, fixed_s=0, per_kv_token_s=0)]}, "above 0"),
        ({"padded": True, "costs": [dict(draft_len=0, rows=1, fixed_s=1, per_kv_token_s=-1)]}, "at least 0"),
        ({"padded": True, "costs": [dict(draft_len=1, rows=1, fixed_s=1, per_kv_token_s=0)]}, "plain"),
        (
            {"padded": True, "costs": 2 * [dict(draft_len=0, rows=1, fixed_s=1, per_kv_token_s=0)]},
            "two costs",
        ),
    ],
)
def test_what_is_refused(data: Any, words: str) -> None:
    with pytest.raises(CostTableError, match=words):
        CostTable.from_dict(data)


FILE = AutoTable("cpu", "model", "drafter", SpecShape(2), EAGER, {"greedy": (0.7, 0.5)}, "by hand")


def test_the_file_survives() -> None:
    assert AutoTable.from_json(FILE.to_json()) == FILE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 2"),
        ({"device": None}, "'device'"),
        ({"shape": {"num_steps": 3}}, "'shape'"),
        ({"shape": {"num_steps": 0, "topk": 1, "num_draft_tokens": 1}}, "above 0"),
        ({"acceptance": [0.5]}, "'acceptance'"),
        ({"acceptance": {"greedy": [1.5]}}, "'greedy'"),
        ({"acceptance": {"greedy": []}}, "'greedy'"),
        ({"costs": None}, "'costs'"),
    ],
)
def test_files_that_are_refused(change: dict[str, Any], words: str) -> None:
    data = json.loads(FILE.to_json()) | change
    with pytest.raises(CostTableError, match=words):
        AutoTable.from_json(json.dumps(data))


@pytest.mark.parametrize(("text", "words"), [("{", "no JSON"), ("[]", "one JSON object")])
def test_text_that_is_no_table(text: str, words: str) -> None:
    with pytest.raises(CostTableError, match=words):
        AutoTable.from_json(text)
