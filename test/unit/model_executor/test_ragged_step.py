"""Rows that verify different numbers of drafts in one step, against ``StepRunner``, which caps them."""

from __future__ import annotations

import random

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import PlanDriver
from helpers.replaying_capture import ReplayingCapture
from helpers.tiny_executor import draft_folder, target_folder, tiny_executor
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.model_executor.graph_sizes import GraphKey, GraphSizes, spread
from sglang.srt.model_executor.step_graphs import StepGraphs
from sglang.srt.model_executor.step_plan import PAD_SLOT, SlotSampling
from sglang.srt.model_executor.step_trace import StepDone, StepTrace

SAMPLINGS = (
    SlotSampling(temperature=0.0),
    SlotSampling(temperature=1.0, seed=11),
    SlotSampling(temperature=0.7, top_k=20, top_p=0.9, min_p=0.02, seed=5),
    SlotSampling(temperature=0.0, frequency_penalty=0.4, repetition_penalty=1.2),
    SlotSampling(temperature=1.3, seed=2**63 + 7, draft_cap=1, presence_penalty=0.5),
    SlotSampling(temperature=0.0, logit_bias=((7, 3.0), (200, -50.0)), min_new_tokens=6, suppressed_ids=(2,)),
)
SHAPE = (3, 1, 4)
NUM_STEPS = 12


def drive(driver: PlanDriver) -> list[tuple[tuple[int, ...], ...]]:
    """What steps of all requests put out, each with as many drafts as chance gives it."""
    rng, requests, results = random.Random(3), [], []
    for index, sampling in enumerate(SAMPLINGS):
        requests.append(driver.add([rng.randrange(3, 250) for _ in range(5 + 17 * index)], sampling, 16))
    for number in range(NUM_STEPS):
        draft_len = 1 + number % SHAPE[0]
        drafts = [rng.randint(0, draft_len) for _ in requests]
        drafts[rng.randrange(len(drafts))] = draft_len
        plan = driver.plan(requests, draft_len, row_drafts=tuple(drafts))
        tokens = driver.run(plan, requests).tokens
        assert all(len(row) <= most + 1 for row, most in zip(tokens, drafts, strict=True))
        results.append(tokens)
    return results


@pytest.mark.parametrize(("family", "page_size"), [("llama", 1), ("qwen3", 16)])
def test_each_row_gives_what_it_gives_beside_rows_with_as_many_drafts(family: str, page_size: int) -> None:
    ragged = PlanDriver(kernel_executor(target_folder(family), draft_folder(family), SHAPE, page_size))
    oracle = PlanDriver(tiny_executor(SHAPE, family, dtype="float32", page_size=page_size))
    got, expected = (drive(driver) for driver in (ragged, oracle))
    assert got == expected
    assert {len(row) for step in got for row in step} >= {1, 2, 3}
    states = [driver.executor.worker.state for driver in (ragged, oracle)]
    assert torch.equal(*(state.seq_len[:7] for state in states))
    torch.testing.assert_close(*(state.draft_feature[:7] for state in states), rtol=1e-4, atol=1e-5)
    for driver in (ragged, oracle):
        driver.executor.shutdown()


class SummingStep:
    """Puts out how many tokens each row is said to verify."""

    def run(self, slots: torch.Tensor, draft_len: int, query_lens: object = None) -> StepDone:
        assert query_lens is not None and int(query_lens.of_rows.sum()) == query_lens.total
        real = (slots != PAD_SLOT).to(torch.int64)
        lens = query_lens.of_rows
        assert lens.min() >= 1 and lens.max() <= draft_len + 1
        packed = torch.stack([lens, real, real], dim=1)
        return StepDone(packed, StepTrace(None, packed, packed, packed, 1))


RAGGED = [GraphKey(3, rows, tokens) for rows in (4, 8) for tokens in range(rows, 4 * rows + 1, 4)]


@given(drafts=st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_padded_rows_take_the_tokens_that_are_left(drafts: list[int]) -> None:
    sizes = GraphSizes({}, pad=True, ragged=RAGGED)
    key = sizes.covering_ragged(3, len(drafts), sum(drafts) + len(drafts))
    fits = [
        k for k in RAGGED
        if 0 <= k.rows - len(drafts) <= k.tokens - sum(drafts) - len(drafts) <= 4 * (k.rows - len(drafts))
    ]  # fmt: skip
    assert key == min(fits, key=lambda k: (k.tokens, k.rows), default=None)
    if key is not None and key.rows > len(drafts):
        left = spread(key.tokens - sum(drafts) - len(drafts), key.rows - len(drafts))
        assert min(left) >= 1 and max(left) <= 4 and sum(left) + sum(drafts) + len(drafts) == key.tokens


def test_graphs_get_each_rows_number() -> None:
    sizes = GraphSizes({0: (4, 8)}, pad=True, ragged=RAGGED)
    graphs = StepGraphs(SummingStep(), ReplayingCapture(), sizes, None, torch.device("cpu"))
    for key in RAGGED:
        graphs.capture_key(key)
    for drafts in ([0, 3, 1, 2], [3, 0, 0, 1, 0], [1] * 8):
        done = graphs.run(range(1, len(drafts) + 1), 3, drafts)
        assert done is not None
        assert done.packed[: len(drafts), 0].tolist() == [count + 1 for count in drafts]
    assert graphs.run(range(1, 9), 3, [3, 3, 3, 2, 3, 3, 3, 3]) is None, "no graph of 31 tokens"
