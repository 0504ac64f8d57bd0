"""A draft model of its own beside device steps, over the kernels' references: its drafts are the oracle's.

The oracle finds out what its cache lacks by comparing ids. Here the host counts, so every way to fall behind
is tried; a draft made on a wrong cache would be accepted at other places.
"""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.kernel_executor import kernel_executor
from helpers.plan_driver import GREEDY, DrivenRequest, PlanDriver
from helpers.tiny_executor import drafter_folder, target_folder, tiny_executor
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.model_executor.step_plan import PageWrite, SlotAdmission, SlotSampling, StepKind, StepPlan
from sglang.srt.speculative.history import TokenHistory
from sglang.srt.speculative.kernel_standalone import WINDOW, StandaloneReader

SHAPE = (3, 1, 4)
PROMPT = [5, 9, 200, 31, 8, 8, 100]
WARM = SlotSampling(temperature=1.0, seed=2)


def both(page_size: int = 2) -> tuple[PlanDriver, PlanDriver]:
    """On kernels' references, and the oracle."""
    folder = drafter_folder("standalone", "llama")
    kernels = kernel_executor(target_folder(), folder, SHAPE, page_size, draft_kind="STANDALONE")
    oracle = tiny_executor(SHAPE, drafter="standalone", dtype="float32", page_size=page_size)
    return PlanDriver(kernels), PlanDriver(oracle)


def compare(requests: list[list[DrivenRequest]]) -> None:
    for got, expected in zip(*requests, strict=True):
        assert got.output == expected.output
        assert got.counts == expected.counts


@pytest.mark.long
@pytest.mark.parametrize("prompt_len", [1, 7, 40])
def test_behind_by_more_than_a_window(prompt_len: int) -> None:
    """Rows that decoded plainly for different times, in texts shorter than a window too."""
    found = []
    for driver in both():
        rng = random.Random(3)
        prompt = [rng.randrange(3, 250) for _ in range(prompt_len)]
        requests = [driver.add(prompt, WARM), driver.add(PROMPT, GREEDY, chunk=3)]
        for plainly in (1, 2 * WINDOW + 3, WINDOW, 0, 5):
            for _ in range(plainly):
                driver.step(requests[: 1 + (plainly != WINDOW)])
            for _ in range(3):
                driver.step(requests, SHAPE[0])
        assert any(max(request.counts) > 2 for request in requests)
        found.append(requests)
        driver.executor.shutdown()
    compare(found)


def test_after_a_prefix_hit_and_in_a_slot_s_next_life() -> None:
    found = []
    for driver in both():
        first = driver.add(PROMPT, WARM)
        driver.generate([first], 20)  # plainly: the draft model has read the prompt alone
        text = first.known[:25]
        second = DrivenRequest(driver.free_slots.pop(), [*text, 7], GREEDY, pages=first.pages[:12])
        plan = driver.plan(prefill=[(second, 24, 26)])
        shared = PageWrite(second.slot, 0, tuple(first.pages[:12]))
        admission = SlotAdmission(second.slot, 26, 24, GREEDY, known_ids=tuple(text))
        driver.run(replace(plan, admissions=(admission,), page_writes=(shared, *plan.page_writes)), [second])
        driver.generate([second], 10, SHAPE[0])
        driver.generate([first, second], 30, SHAPE[0])
        second.pages = second.pages[12:]
        driver.release(second)
        third = driver.add(PROMPT[::-1], WARM)
        assert third.slot == second.slot
        driver.generate([first, third], 40, SHAPE[0])
        found.append([first, second, third])
        driver.executor.shutdown()
    compare(found)


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=60), seed=st.integers(0, 99))
def test_the_host_s_count_is_never_too_small(steps: list[tuple[int, int]], seed: int) -> None:
    """V >= L - 1 - behind, whatever is accepted: (drafts, accepted at most) of one row's steps."""
    rng = random.Random(seed)
    length = cached = rng.randint(1, 20)  # L and V behind a prefill
    reader = StandaloneReader.__new__(StandaloneReader)
    reader._behind = {1: -1}
    asked: list[int] = []
    reader.catch_up = lambda behind: asked.append(behind[1])  # type: ignore[method-assign]
    for step, (draft_len, most) in enumerate(steps):
        reader.read(StepPlan(step, StepKind.DECODE, (1,), (length,), draft_len))
        if not draft_len:
            length += 1
            continue
        assert length - 1 - max(0, asked[-1]) <= cached
        accepted = min(draft_len, most)
        cached = length + min(accepted, draft_len - 1) + 1
        length += accepted + 1


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(1, 90), st.integers(-1, 70)), min_size=1, max_size=5))
def test_windows_reach_from_what_is_cached_to_the_last_two_tokens(rows: list[tuple[int, int]]) -> None:
    """rows: L, and how far behind; V follows from them. No window begins beyond V."""
    reader = StandaloneReader.__new__(StandaloneReader)
    reader._history = TokenHistory(len(rows) + 1, 100, torch.device("cpu"))
    reader._state = SimpleNamespace(seq_len=torch.tensor([1, *(length for length, _ in rows)]))  # type: ignore[assignment]
    cached = {slot: max(0, length - 1 - max(0, lag)) for slot, (length, lag) in enumerate(rows, start=1)}

    def read(slots: torch.Tensor, base: torch.Tensor) -> None:
        for slot, begin in zip(slots.tolist(), base.tolist(), strict=True):
            assert 0 <= begin <= cached[slot]
            cached[slot] = max(cached[slot], begin + WINDOW)

    reader._read_window = read  # type: ignore[method-assign]
    reader.catch_up({0: 5} | {slot: lag for slot, (_, lag) in enumerate(rows, start=1)})
    assert all(cached[slot] >= length - 1 for slot, (length, _) in enumerate(rows, start=1))
