"""What a time is made of, with a GPU's events faked: it needs none."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from sgl_kernel.timing import graph_micros


def test_the_best_run_counts_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = [0.0], []
    costs = iter([5.0, 5.0, 2.0, 2.0, 9.0, 9.0])  # ms of each replay

    class Graph:
        def replay(self) -> None:
            clock[0] += next(costs)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def synchronize(self) -> None:
            log.append("waited")

        def elapsed_time(self, end: Event) -> float:
            return end.at - self.at

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, capture_error_mode: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("loaded"))
    assert graph_micros(lambda: log.append("ran"), replays=2, runs=3) == 2000.0
    assert log == ["ran", "loaded", "ran", "waited", "waited", "waited"]
