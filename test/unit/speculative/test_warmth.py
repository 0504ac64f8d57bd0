"""The draft cache is exact after any history: KV and drafts are those of a fresh prefill. float64."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from helpers.plan_driver import GREEDY, DrivenRequest, PlanDriver
from helpers.tiny_executor import tiny_executor

from sglang.srt.model_executor.drafter import DraftContext, DraftTree
from sglang.srt.model_executor.step_plan import PageWrite, SlotAdmission, SlotSampling

PROMPT = [5, 9, 200, 31, 8, 8, 100]
WARM = SlotSampling(temperature=1.0, seed=2)


def _cache(driver: PlanDriver, request: DrivenRequest, pool_index: int) -> torch.Tensor:
    """[layers, L, …] KV of the committed positions."""
    pool = driver.executor.worker.pools[pool_index]
    size = pool.page_size
    places = [request.pages[t // size] * size + t % size for t in range(request.seq_len)]
    return pool.kv[:, places]


def _drafts(driver: PlanDriver, request: DrivenRequest, draft_len: int) -> DraftTree:
    """What would be drafted now; the state stays as it is."""
    driver.reserve(request, request.seq_len + 20)
    worker = driver.executor.worker
    slots = torch.tensor([request.slot])
    assert worker.drafter is not None
    with torch.inference_mode():
        ctx = DraftContext(
            slots,
            worker.state.seq_len[slots].long(),
            request.seq_len,
            worker.state.next_token[slots],
            worker.state.draft_feature[slots],
            request.sampling.temperature > 0,
        )
        return worker.drafter.draft(ctx, draft_len)


def _check_warm(driver: PlanDriver, request: DrivenRequest) -> None:
    """Against a new request whose prompt is everything known but the last id."""
    steps = driver.info.spec.num_steps if driver.info.spec else 0
    state = driver.executor.worker.state
    fresh = DrivenRequest(
        driver.free_slots.pop(), list(request.prompt), request.sampling, request.output[:-1]
    )
    for plan in driver.prefill_plans(fresh):
        driver.run(plan, [fresh])
    assert fresh.output == request.output
    assert int(state.seq_len[request.slot]) == int(state.seq_len[fresh.slot]) == request.seq_len
    assert int(state.next_token[request.slot]) == request.output[-1]
    for pool in (0, 1):
        torch.testing.assert_close(
            _cache(driver, request, pool), _cache(driver, fresh, pool), rtol=1e-9, atol=1e-9
        )
    feature = state.draft_feature
    torch.testing.assert_close(feature[request.slot], feature[fresh.slot], rtol=1e-9, atol=1e-9)
    ours, theirs = _drafts(driver, request, steps), _drafts(driver, fresh, steps)
    assert ours.tokens.equal(theirs.tokens) and ours.parents.equal(theirs.parents)
    driver.release(fresh)


@pytest.mark.parametrize("shape,sampling", [((3, 1, 4), GREEDY), ((3, 3, 9), WARM)], ids=str)
def test_after_plain_steps(shape: tuple[int, int, int], sampling: SlotSampling) -> None:
    driver = PlanDriver(tiny_executor(shape))
    request = driver.add(PROMPT, sampling)
    _check_warm(driver, request)
    for num_steps in (1, 49, 450):
        driver.generate([request], len(request.output) + num_steps)
        _check_warm(driver, request)


@pytest.mark.parametrize("chunk", [1, 2, 3, 6])
def test_after_a_prefill_in_chunks(chunk: int) -> None:
    driver = PlanDriver(tiny_executor((3, 1, 4), page_size=4))
    request = driver.add(PROMPT, WARM, chunk=chunk)
    driver.step([request])
    _check_warm(driver, request)


@pytest.mark.parametrize("shape", [(1, 1, 2), (3, 1, 4), (2, 4, 16), (5, 4, 8)], ids=str)
def test_after_steps_of_all_modes(shape: tuple[int, int, int]) -> None:
    driver = PlanDriver(tiny_executor(shape, draft_vocab=None, page_size=4))
    rng = random.Random(1)
    requests = [driver.add(PROMPT, WARM), driver.add(PROMPT[:3], GREEDY)]
    for _ in range(6):
        for _ in range(5):
            driver.step(requests, rng.choice([0, 1, shape[0]]))
        for request in requests:
            _check_warm(driver, request)
    assert max(requests[0].counts) > 1


def test_after_mixed_steps() -> None:
    """A prompt arrives in chunks while another request decodes in the same steps."""
    driver = PlanDriver(tiny_executor((3, 1, 4), page_size=4))
    running = driver.add(PROMPT, WARM)
    new = DrivenRequest(driver.free_slots.pop(), list(PROMPT), GREEDY)
    for start in range(0, len(PROMPT), 3):
        plan = driver.plan(decode=[running], prefill=[(new, start, min(start + 3, len(PROMPT)))])
        driver.run(plan, [running, new])
        _check_warm(driver, running)
    _check_warm(driver, new)


def test_after_a_prefix_hit_on_shared_pages() -> None:
    """Two requests share the pages of a prompt; the first speculates on while the second begins."""
    driver = PlanDriver(tiny_executor((3, 1, 4), page_size=2))
    first = driver.add(PROMPT, WARM)
    driver.generate([first], 5, 3)
    second = DrivenRequest(driver.free_slots.pop(), list(PROMPT), GREEDY, pages=first.pages[:3])
    plan = driver.plan(prefill=[(second, 6, 7)])
    shared = PageWrite(second.slot, 0, tuple(first.pages[:3]))
    admission = SlotAdmission(second.slot, len(PROMPT), 6, GREEDY)
    driver.run(replace(plan, admissions=(admission,), page_writes=(shared, *plan.page_writes)), [second])
    driver.generate([first, second], 15, 3)
    _check_warm(driver, first)
    _check_warm(driver, second)


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 9)], ids=str)
def test_drafting_leaves_the_committed_cache_alone(shape: tuple[int, int, int]) -> None:
    driver = PlanDriver(tiny_executor(shape))
    request = driver.add(PROMPT, WARM)
    driver.generate([request], 10, shape[0])
    before = [_cache(driver, request, pool).clone() for pool in (0, 1)]
    _drafts(driver, request, shape[0])
    assert all(_cache(driver, request, pool).equal(before[pool]) for pool in (0, 1))
