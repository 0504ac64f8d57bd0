"""Medians, means, paired ratios and their 95 % intervals; where two curves cross. Pure functions."""

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
LEAST_FOR_INTERVAL = 3
_STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Of 1 to 10 degrees of freedom."""


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


def few_estimate(values: Sequence[float]) -> Estimate:
    """Return the geometric mean of a few positive values with Student's 95 % interval of their logarithms.

    For 3 to 10 repeats, where a bootstrap's interval is too narrow. Fewer have none (from 0 to infinity):
    that of two values reaches 13 standard errors to either side, which says nothing.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0 or bool((data <= 0).any()):
        raise ValueError("no values to estimate from, or some that are not above 0")
    logs = np.log(data)
    middle = float(logs.mean())
    if data.size < LEAST_FOR_INTERVAL:
        return Estimate(math.exp(middle), 0.0, math.inf)
    half = student_95(data.size - 1) * float(logs.std(ddof=1)) / math.sqrt(data.size)
    return Estimate(math.exp(middle), math.exp(middle - half), math.exp(middle + half))


def few_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Return `few_estimate` of the ratios of values measured side by side."""
    return few_estimate([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def student_95(freedom: int) -> float:
    """Return the two-sided 95 % quantile of Student's t; beyond the table, by its expansion."""
    if freedom <= len(_STUDENT_95):
        return _STUDENT_95[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


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
