"""``DecodeStep`` behind graphs (replayed by calling it again) against ``StepRunner``, on a CPU.

Run alone: ``pytest THIS_FILE``.
"""

from __future__ import annotations

import random

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import PlanDriver
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.model_executor.graph_sizes import GraphSizes
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_graphs import DecodeSteps, StepGraphs
from sglang.srt.model_executor.step_plan import SlotSampling

CPU = torch.device("cpu")
SAMPLINGS = (
    SlotSampling(temperature=0.0),
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.0, frequency_penalty=0.4),
)


def with_graphs(shape: tuple[int, int, int] | None) -> InProcessExecutor:
    """Graphs for 2 and 4 plain rows, and for 2 that speculate."""
    draft = None if shape is None else draft_folder()
    executor = kernel_executor(target_folder(), draft, shape, 4)
    worker = executor.worker
    assert worker._decode_steps is not None
    step = worker._decode_steps.step
    sizes = {0: (2, 4)} | ({shape[0]: (2,)} if shape else {})
    graphs = StepGraphs(step, ReplayingCapture(), GraphSizes(sizes, pad=True), worker.config.spec, CPU)
    assert len(graphs.capture_all()) == len(sizes)
    worker._decode_steps = DecodeSteps(step, graphs, CPU)
    return executor


@pytest.mark.parametrize("shape", [None, (3, 1, 4), (2, 4, 16)])
def test_texts_are_the_same_through_padded_graphs_and_eager_steps(
    shape: tuple[int, int, int] | None,
) -> None:
    texts, covered = [], set()
    for executor in (with_graphs(shape), tiny_executor(shape, dtype="float32", page_size=4)):
        driver, rng = PlanDriver(executor), random.Random(3)
        requests = [
            driver.add([rng.randrange(3, 250) for _ in range(4 + 9 * index)], SAMPLINGS[index % 3])
            for index in range(5)
        ]
        for num_rows, draft_len in [(1, 0), (3, 0), (5, 0), (1, 1), (2, 1), (3, 1), (2, 0), (4, 0)] * 3:
            rows = requests[:num_rows]
            result = driver.step(rows, shape[0] if shape and draft_len else 0)
            covered.add((num_rows, bool(shape and draft_len), result.used_graph))
        texts.append([request.output for request in requests])
        executor.shutdown()
    assert texts[0] == texts[1]
    expected = {(1, False), (2, False), (3, False), (4, False)} | ({(1, True), (2, True)} if shape else set())
    assert {key[:2] for key in covered if key[2] is True} == expected
    assert {key[:2] for key in covered if key[2] is False} == {(5, False)} | ({(3, True)} if shape else set())
