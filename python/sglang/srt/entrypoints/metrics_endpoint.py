"""GET /metrics: what all processes have written into the metrics folder, as one text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from fastapi import APIRouter
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector
from starlette.responses import Response


class _WithoutNan:
    """A gauge in a file can't be taken back: NaN stands for "no value", and is left out here."""

    def __init__(self, folder: Path) -> None:
        self._collector = MultiProcessCollector(None, path=str(folder))

    def collect(self) -> Iterator[Metric]:
        for metric in self._collector.collect():
            metric.samples = [sample for sample in metric.samples if not math.isnan(sample.value)]
            if metric.samples:
                yield metric


def metrics_router(folder: Path) -> APIRouter:
    router = APIRouter()

    @router.get("/metrics")
    def metrics() -> Response:
        registry = CollectorRegistry()
        registry.register(_WithoutNan(folder))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    return router
