"""How long launches take on a GPU, without what launching them costs."""

from __future__ import annotations

from collections.abc import Callable

import torch


def graph_micros(run: Callable[[], object], replays: int, runs: int) -> float:
    """Microseconds of one replay of a CUDA graph of ``run``, the best of some runs of so many replays.

    ``run`` is called once before the capture: kernels are compiled and loaded then, and its errors show.
    """
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # thread_local: NCCL's own thread may look at events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    best = float("inf")
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best * 1e3 / replays
