"""Unit tests of the benchmark's statistics."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.spec_toggle.stats import (
    bootstrap,
    crossover,
    mean_estimate,
    median_estimate,
    paired_ratio,
    ratio_of_sums,
)


def test_median_of_equal_values_has_no_width() -> None:
    estimate = median_estimate([2.0] * 5)
    assert (estimate.value, estimate.low, estimate.high) == (2.0, 2.0, 2.0)


def test_median_interval_is_inside_the_data_and_holds_the_median() -> None:
    estimate = median_estimate([10.0, 12.0, 11.0, 30.0, 11.5])
    assert estimate.value == 11.5
    assert 10.0 <= estimate.low <= estimate.value <= estimate.high <= 30.0


def test_mean_interval_agrees_with_the_normal_one() -> None:
    values = np.random.default_rng(0).normal(5.0, 2.0, size=400)
    estimate = mean_estimate(values.tolist())
    half = 1.96 * values.std() / np.sqrt(values.size)
    assert estimate.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert estimate.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_mean_interval_covers_the_truth_about_95_times_in_100() -> None:
    random = np.random.default_rng(1)
    samples = [random.normal(1.0, 0.3, size=30).tolist() for _ in range(300)]
    estimates = [bootstrap(s, lambda x: np.mean(x, axis=-1), resamples=500) for s in samples]
    covered = np.mean([estimate.contains(1.0) for estimate in estimates])
    assert 0.90 <= covered <= 0.98


def test_paired_ratio_ignores_drift_common_to_both() -> None:
    drift = [1.0, 1.3, 0.7, 2.0, 1.1]
    estimate = paired_ratio([3.0 * d for d in drift], [2.0 * d for d in drift])
    assert estimate.value == pytest.approx(1.5)
    assert estimate.high - estimate.low == pytest.approx(0.0, abs=1e-12)


def test_ratio_of_sums_weighs_sequences_by_their_steps() -> None:
    estimate = ratio_of_sums([30.0, 2.0], [10.0, 2.0])
    assert estimate.value == pytest.approx(32.0 / 12.0)
    assert estimate.low == pytest.approx(1.0)
    assert estimate.high == pytest.approx(3.0)


def test_ratio_of_sums_allows_sequences_without_steps() -> None:
    assert ratio_of_sums([6.0, 0.0], [2.0, 0.0]).value == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ([1.8, 1.4, 1.2], None),
        ([0.9, 0.8, 0.7], 1.0),
        ([1.5, 1.25, 0.75], 2.0**1.5),
        ([1.5, 1.0, 0.5], 2.0),
        ([1.5, 0.5, 1.5], 2.0**0.5),
    ],
)
def test_crossover(ratios: list[float], expected: float | None) -> None:
    found = crossover([1, 2, 4], ratios)
    assert found == (None if expected is None else pytest.approx(expected))


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        median_estimate([])
    with pytest.raises(ValueError, match="2 numerators for 1"):
        paired_ratio([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="no values"):
        ratio_of_sums([0.0], [0.0])


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-q"]))
