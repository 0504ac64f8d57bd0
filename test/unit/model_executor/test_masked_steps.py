"""Steps whose choices wait for masks: by ``StepRunner``, and by ``DecodeStep`` with and without graphs.

Run alone: ``pytest THIS_FILE``. What may follow a text is a function of its last two ids.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import DrivenRequest, PlanDriver
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor

from sglang.srt.model_executor.graph_sizes import GraphSizes
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.split_graphs import SplitGraphs, split_sizes
from sglang.srt.model_executor.step_graphs import DecodeSteps
from sglang.srt.model_executor.step_plan import RowWish, SlotSampling, StepDrafts, StepMidInput, StepPlan

CPU = torch.device("cpu")
VOCAB = 256
SAMPLINGS = (
    SlotSampling(temperature=0.0),
    SlotSampling(temperature=1.0, seed=11, top_k=40),
    SlotSampling(temperature=0.7, seed=3, frequency_penalty=0.4),
)


def allowed_after(text: Sequence[int]) -> list[bool]:
    rng = random.Random(text[-2] * 1000 + text[-1])
    return [rng.random() < 0.5 for _ in range(VOCAB)]


def masks_of(plan: StepPlan, rows: dict[int, DrivenRequest], drafts: StepDrafts | None) -> StepMidInput:
    """For the rows of ``rows``; others are free."""
    nodes = []
    for row, request in rows.items():
        tokens = drafts.tokens[row] if drafts is not None else (request.known[-1],)
        parents = drafts.parents[row] if drafts is not None and drafts.parents is not None else None
        paths = [request.known]
        for node in range(1, len(tokens)):
            paths.append([*paths[node - 1 if parents is None else parents[node]], tokens[node]])
        nodes.append([allowed_after(path) for path in paths])
    bits = np.packbits(np.array(nodes), axis=-1, bitorder="little").view(np.int32)
    return StepMidInput(plan.step_id, tuple(rows), len(nodes[0]), memoryview(bits.tobytes()))


def with_split_graphs(executor: InProcessExecutor, shape: tuple[int, int, int] | None) -> InProcessExecutor:
    """For up to 4 plain rows, and up to 2 that speculate."""
    worker = executor.worker
    assert worker._decode_steps is not None
    step = worker._decode_steps.step
    sizes = split_sizes(GraphSizes({0: (4,)} | ({shape[0]: (2,)} if shape else {}), pad=True))
    split = SplitGraphs(step, ReplayingCapture(), sizes, worker.config.spec, VOCAB, CPU)
    split.capture_all()
    worker._decode_steps = DecodeSteps(step, None, CPU, split)
    return executor


def masked_step(driver: PlanDriver, plan: StepPlan, rows: list[DrivenRequest], free: int) -> bool | None:
    """All rows but number ``free`` have masks."""
    masked = {row: request for row, request in enumerate(rows) if row != free}
    before = [len(request.known) for request in rows]
    wishes = tuple(RowWish(row, True, num_top=VOCAB) for row in range(len(rows)))
    plan = replace(plan, masked=True, wishes=wishes)
    pending = driver.executor.launch(plan)
    driver.executor.supply(masks_of(plan, masked, pending.drafts() if plan.draft_len else None))
    result = pending.wait()
    for row, request in enumerate(rows):
        request.output += result.tokens[row]
        known = request.known
        told = result.reports[row].chosen
        for place, end in enumerate(range(before[row], len(known)) if row in masked else ()):
            allowed = allowed_after(known[:end])
            assert allowed[known[end]], "a token that the mask forbids"
            of_ids = dict(zip(told.top_ids[place], told.top[place], strict=True))
            assert told.own[place] == of_ids[known[end]]
            assert all((value > -1e30) == allowed[token] for token, value in of_ids.items())
            assert sum(math.exp(value) for value in of_ids.values()) == pytest.approx(1, abs=1e-4)
    return result.used_graph


@pytest.mark.parametrize("shape", [None, (3, 1, 4), (2, 4, 16)], ids=str)
def test_every_step_obeys_its_masks_and_all_choose_the_same(shape: tuple[int, int, int] | None) -> None:
    draft = None if shape is None else draft_folder()
    texts, used = [], []
    for executor in (
        tiny_executor(shape, dtype="float32", page_size=4),
        kernel_executor(target_folder(), draft, shape, 4),
        with_split_graphs(kernel_executor(target_folder(), draft, shape, 4), shape),
    ):
        driver, rng = PlanDriver(executor), random.Random(3)
        requests = []
        for index in range(5):
            prompt = [rng.randrange(3, 250) for _ in range(4 + 9 * index)]
            requests.append(DrivenRequest(driver.free_slots.pop(), prompt, SAMPLINGS[index % 3]))
            masked_step(driver, next(iter(driver.prefill_plans(requests[-1]))), requests[-1:], free=9)
        graphs = set()
        for count, speculates in [(1, 0), (3, 0), (5, 0), (1, 1), (2, 1), (3, 1), (4, 0)] * 2:
            rows, draft_len = requests[:count], shape[0] if shape and speculates else 0
            if rng.random() < 0.3:  # a step of the other kind between them
                driver.step(rows, draft_len)
                continue
            covered = count <= (2 if draft_len else 4)
            plan = driver.plan(decode=rows, draft_len=draft_len)
            graphs.add((masked_step(driver, plan, rows, free=count % 3), covered))
        used.append(graphs)
        texts.append([request.output for request in requests])
        executor.shutdown()
    assert texts[0] == texts[1] == texts[2]
    assert used[0] <= {(None, True), (None, False)} and used[1] <= {(False, True), (False, False)}
    assert used[2] == {(True, True), (False, False)}
