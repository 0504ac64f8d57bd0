"""Reading side of metrics that other processes write (PROMETHEUS_MULTIPROC_DIR)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from prometheus_client import Metric


class Collector(Protocol):
    def collect(self) -> Iterable[Metric]: ...


class WithoutNan:
    """Leaves out samples that are NaN: a gauge in a multiprocess file can't be removed by its writer,
    so it says "there is no such figure just now" with NaN. ``registry.register(WithoutNan(collector))``.
    """

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def collect(self) -> Iterable[Metric]:
        for metric in self._collector.collect():
            metric.samples = [sample for sample in metric.samples if not math.isnan(sample.value)]
            yield metric
