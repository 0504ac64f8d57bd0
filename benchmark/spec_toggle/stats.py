"""Medians, paired ratios and their 95 % bootstrap intervals; where two curves cross. Pure functions."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Statistic = Callable[[Floats], Floats]
"""Reduces the last axis of ``[resamples, values]`` to ``[resamples]``."""

RESAMPLES = 10_000
SEED = 20261129


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float

    def contains(self, figure: float) -> bool:
        """Whether ``figure`` lies in the interval."""
        return self.low <= figure <= self.high


def median_estimate(values: Sequence[float]) -> Estimate:
    """Return the median with a 95 % percentile-bootstrap interval."""
    return bootstrap(values, lambda sample: np.median(sample, axis=-1))


def mean_estimate(values: Sequence[float]) -> Estimate:
    """Return the mean with a 95 % percentile-bootstrap interval."""
    return bootstrap(values, lambda sample: np.mean(sample, axis=-1))


def bootstrap(values: Sequence[float], statistic: Statistic, resamples: int = RESAMPLES) -> Estimate:
    """Return ``statistic`` of the values with its 95 % percentile-bootstrap interval."""
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        raise ValueError("no values to estimate from")
    picks = _picks(data.size, resamples)
    return _estimate(float(statistic(data)), statistic(data[picks]))


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return the median of the ratios of values measured side by side (same repeat), with its interval."""
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators for {len(denominators)} denominators")
    return median_estimate([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], resamples: int = RESAMPLES
) -> Estimate:
    """Return sum/sum with an interval that resamples the pairs (here: sequences), not the single steps."""
    if len(numerators) != len(denominators):
        raise ValueError(f"{len(numerators)} numerators for {len(denominators)} denominators")
    tops = np.asarray(numerators, dtype=np.float64)
    bottoms = np.asarray(denominators, dtype=np.float64)
    if bottoms.size == 0 or float(bottoms.sum()) == 0.0:
        raise ValueError("no values to estimate from")
    picks = _picks(tops.size, resamples)
    sums = bottoms[picks].sum(axis=-1)
    kept = sums > 0
    ratios = tops[picks].sum(axis=-1)[kept] / sums[kept]
    return _estimate(float(tops.sum() / bottoms.sum()), ratios)


def crossover(points: Sequence[int], ratios: Sequence[float]) -> float | None:
    """Return the first point where ``ratios`` fall below 1, interpolated on a logarithmic axis.

    None where they never do. The first point itself where they are below 1 from the start.
    """
    for index, ratio in enumerate(ratios):
        if ratio >= 1.0:
            continue
        if index == 0:
            return float(points[0])
        before = ratios[index - 1]
        share = (before - 1.0) / (before - ratio)
        low, high = math.log2(points[index - 1]), math.log2(points[index])
        return float(2.0 ** (low + share * (high - low)))
    return None


def _picks(size: int, resamples: int) -> NDArray[np.int64]:
    """Return the indices of the resamples, ``[resamples, size]``; the same ones on every call."""
    return np.random.default_rng(SEED).integers(0, size, size=(resamples, size))


def _estimate(value: float, resampled: Floats) -> Estimate:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Estimate(value, float(low), float(high))
