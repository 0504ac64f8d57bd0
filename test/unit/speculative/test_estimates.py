"""What ``auto`` believes: corrections of costs, and acceptance by class and depth."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.model_executor.step_plan import StepCost
from sglang.srt.speculative.acceptance import DEFAULT_PRIOR, MOST_CLASSES, AcceptanceEstimate
from sglang.srt.speculative.cost_model import DOUBT, CostModel
from sglang.srt.speculative.cost_table import CostTable

TABLE = CostTable.from_costs(
    [StepCost(k, n, 0.004 * (1 + 0.1 * k) + 2e-5 * n * (k + 1), 1e-8) for k in (0, 1, 3) for n in (1, 8, 64)],
    padded=True,
)


def _run(model: CostModel, truth: dict[int, float], num_steps: int, seed: int, outliers: float = 0.0) -> None:
    source = random.Random(seed)
    for _ in range(num_steps):
        k = source.choice(list(truth))
        seconds = TABLE.seconds(k, 8, 8000) * truth[k] * source.gauss(1.0, 0.01)
        model.observe(k, 8, 8000, seconds * (10.0 if source.random() < outliers else 1.0))


@pytest.mark.parametrize("factor", [0.3, 0.8, 1.0, 1.25, 4.0])
@pytest.mark.parametrize("outliers", [0.0, 0.01])
def test_a_constant_factor_is_learned_whatever_the_outliers(factor: float, outliers: float) -> None:
    model = CostModel(TABLE)
    _run(model, {0: factor}, 1500, seed=1, outliers=outliers)
    assert model.seconds(0, 8, 8000) == pytest.approx(factor * TABLE.seconds(0, 8, 8000), rel=0.02)
    assert model.seconds(0, 8, 500) == pytest.approx(factor * TABLE.seconds(0, 8, 500), rel=0.02)


def test_draft_lengths_are_corrected_apart() -> None:
    model = CostModel(TABLE)
    truth = {0: 0.9, 1: 1.1, 3: 1.3}
    _run(model, truth, 3000, seed=2, outliers=0.01)
    for k, factor in truth.items():
        assert model.seconds(k, 8, 8000) == pytest.approx(factor * TABLE.seconds(k, 8, 8000), rel=0.02)


def test_a_drift_of_all_steps_reaches_those_that_are_not_run() -> None:
    model = CostModel(TABLE)
    _run(model, {0: 1.5}, 20_000, seed=3)
    assert model.seconds(3, 64, 1000) == pytest.approx(1.5 * TABLE.seconds(3, 64, 1000), rel=0.1)


def test_one_outlier_moves_little() -> None:
    model = CostModel(TABLE)
    _run(model, {0: 1.0}, 100, seed=4)
    before = model.seconds(0, 8, 8000)
    model.observe(0, 8, 8000, 10 * before)
    assert before < model.seconds(0, 8, 8000) < 1.03 * before


def test_what_has_not_run_may_be_cheaper_than_thought() -> None:
    model = CostModel(TABLE)
    likely, least = model.both_seconds(3, 8, 8000)
    assert least == pytest.approx(likely * (1 - DOUBT))
    _run(model, {3: 1.0}, 100, seed=5)
    likely, least = model.both_seconds(3, 8, 8000)
    assert 0.99 * likely < least < likely
    _run(model, {0: 1.0}, 10_000, seed=5)
    likely, least = model.both_seconds(3, 8, 8000)
    assert least < 0.92 * likely


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_times_that_are_none_are_ignored(seconds: float) -> None:
    model = CostModel(TABLE)
    model.observe(0, 8, 0, seconds)
    model.observe(2, 8, 0, 0.1)  # of a length that was not measured
    assert model.figures() == {"common": 1.0, "by_draft_len": {}, "by_draft_len_and_rows": {}}
    assert model.seconds(2, 8, 0) == math.inf


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 2, 3]), st.integers(1, 500), st.floats(1e-6, 1e3)), max_size=60)
)
def test_memory_is_bounded_and_costs_stay_costs(steps: list[tuple[int, int, float]]) -> None:
    model = CostModel(TABLE)
    for k, rows, seconds in steps:
        model.observe(k, rows, rows * 100, seconds)
    assert len(model.figures()["by_draft_len_and_rows"]) <= len(TABLE.costs)
    for k in TABLE.draft_lens:
        likely, least = model.both_seconds(k, 8, 800)
        assert 0 < least <= likely < math.inf


# ---- acceptance -----------------------------------------------------------------------------------


def _feed(
    estimate: AcceptanceEstimate, name: str, parts: list[float], rows: int, num_steps: int, seed: int = 0
) -> None:
    source = random.Random(seed)
    for _ in range(num_steps):
        correct = [0] * len(parts)
        for _ in range(rows):
            for depth, part in enumerate(parts):
                if source.random() >= part:
                    break
                correct[depth] += 1
        estimate.step()
        estimate.observe(name, [rows] * len(parts), correct)


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_estimates_converge_and_forget(rows: int) -> None:
    estimate = AcceptanceEstimate(3)
    for seed, parts in enumerate(([0.8, 0.7, 0.6], [0.3, 0.4, 0.5], [0.9, 0.9, 0.9])):
        _feed(estimate, "greedy", parts, rows, 500, seed)
        assert estimate.parts("greedy") == pytest.approx(parts, abs=0.25 if rows == 1 else 0.1)


def test_classes_are_apart_and_unknown_ones_have_the_prior() -> None:
    estimate = AcceptanceEstimate(4, {"sampled": [0.4, 0.2]})
    _feed(estimate, "greedy", [0.9, 0.9, 0.9, 0.9], 16, 300)
    assert estimate.parts("greedy") == pytest.approx([0.9] * 4, abs=0.07)
    assert estimate.parts("sampled") == (0.4, 0.2, 0.2, 0.2)
    assert estimate.parts("new") == (*DEFAULT_PRIOR, DEFAULT_PRIOR[-1])
    assert estimate.expected_tokens((("sampled", 10.0),), 2) == pytest.approx(10 * (1 + 0.4 + 0.08))
    both = estimate.expected_tokens((("sampled", 10.0), ("greedy", 5.0)), 3)
    alone = [estimate.expected_tokens(((name, n),), 3) for name, n in (("sampled", 10.0), ("greedy", 5.0))]
    assert both == pytest.approx(sum(alone))


def test_what_is_not_seen_keeps_its_mean_and_loses_trust() -> None:
    estimate = AcceptanceEstimate(3)
    counts = (("greedy", 8.0),)
    _feed(estimate, "greedy", [0.2, 0.2, 0.2], 64, 200)
    mean, upper = estimate.extra_tokens(counts, 3), estimate.most_extra_tokens(counts, 3)
    for _ in range(5000):
        estimate.step()
    assert estimate.extra_tokens(counts, 3) == mean
    assert upper[1] < 1.3 * mean[1]
    assert estimate.most_extra_tokens(counts, 3) == pytest.approx([0, 8, 16, 24], abs=0.01)


def test_depths_that_were_not_tried_are_left_alone() -> None:
    estimate = AcceptanceEstimate(3)
    estimate.observe("greedy", [10], [2])
    assert estimate.parts("greedy")[1:] == DEFAULT_PRIOR[1:]
    estimate.observe("greedy", [10, 10, 10], [0, 0, 0])  # nobody reached the second draft
    assert estimate.parts("greedy")[1:] == DEFAULT_PRIOR[1:]
    estimate.observe("greedy", [], [])
    estimate.observe("greedy", [0, 0, 0], [0, 0, 0])


tallies = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 60), st.integers(0, 60)), max_size=40)


@settings(max_examples=50, deadline=None)
@given(tallies, st.integers(0, 3), st.lists(st.tuples(st.sampled_from("abc"), st.floats(0, 100)), max_size=3))
def test_any_tally_gives_chances(
    seen: list[tuple[int, int, int]], longest: int, counts: list[tuple[str, float]]
) -> None:
    """Tallies of rows that end in mid-step or have a cap are not quite consistent."""
    estimate = AcceptanceEstimate(3)
    for rows, first, second in seen:
        estimate.step()
        estimate.observe("a", [rows, rows, rows], [first, second, second])
    assert all(0.0 <= part <= 1.0 for part in estimate.parts("a"))
    likely = estimate.extra_tokens(tuple(counts), longest)
    most = estimate.most_extra_tokens(tuple(counts), longest)
    assert len(likely) == len(most) == longest + 1
    total = sum(rows for _, rows in counts)
    for k in range(longest + 1):
        assert 0.0 <= likely[k] <= most[k] + 1e-9 <= k * total + 1e-6
        assert k == 0 or likely[k - 1] <= likely[k]


def test_classes_are_bounded() -> None:
    estimate = AcceptanceEstimate(2)
    for n in range(100):
        estimate.observe(f"class {n}", [10, 10], [5, 2])
    assert len(estimate.figures()) == MOST_CLASSES + 1
    assert estimate.parts("class 99") == estimate.parts("class 50")
