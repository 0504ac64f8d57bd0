"""A draft model of its own beside device steps, over the kernels' references: its drafts are the oracle's.

The oracle finds out what its cache lacks by comparing ids. Here the host counts, so every way to fall behind
is tried; a draft made on a wrong cache would be accepted at other places.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
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
from sglang.srt.speculative.kernel_standalone import (
    CHUNK,
    WINDOW,
    Piece,
    StandaloneReader,
    chunked,
)

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


class Recorder(StandaloneReader):
    """Of one step after the other, without a model: V of every slot, as far as what is read says."""

    def __init__(self, lens: dict[int, int]) -> None:
        self._history = TokenHistory(max(lens) + 1, 200, torch.device("cpu"))
        self._state = SimpleNamespace(seq_len=torch.ones(max(lens) + 1, dtype=torch.int64))  # type: ignore[assignment]
        self._behind = dict.fromkeys(lens, -1)
        self.cached = dict(lens)
        self.num_forwards = 0

    def _note(self, slot: int, start: int, end: int) -> None:
        assert 0 <= start <= self.cached[slot], "nothing is left out"
        self.cached[slot] = max(self.cached[slot], end)

    def _read_window(self, slots: torch.Tensor, base: torch.Tensor) -> None:
        self.num_forwards += 1
        for slot, begin in zip(slots.tolist(), base.tolist(), strict=True):
            self._note(slot, begin, begin + WINDOW)

    def _read_pieces(self, pieces: Sequence[Piece]) -> None:
        self.num_forwards += 1
        assert sum(piece.length for piece in pieces) <= CHUNK
        assert len({piece.slot for piece in pieces}) == len(pieces)
        for slot, start, length in pieces:
            self._note(slot, start, start + length)


Step = tuple[int, int, int, bool]
"""Plain steps, then one of so many drafts (0: none), how many are accepted at most, and whether plans are
made before the last step is known."""


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 3]), st.integers(0, 3), st.booleans()),
        max_size=5,
    ),
    seed=st.integers(0, 99),
)
def test_nothing_is_left_out_whatever_is_accepted(steps: list[Step], seed: int) -> None:
    """V >= L - 1 in every speculative step, from what the host is told: bounds, and draft lengths."""
    rng = random.Random(seed)
    lens = {slot: rng.randint(1, 20) for slot in (1, 2)}
    reader = Recorder(lens)
    accepted = unknown = 0
    plans = [one for plain, *last in steps for one in [*([(0, 0, last[2])] * plain), tuple(last)]]
    for step, (draft_len, most, overlaps) in enumerate(plans):
        bounds = tuple(length + unknown * overlaps for length in lens.values())
        for slot, length in lens.items():
            reader._state.seq_len[slot] = length
        reader.read(StepPlan(step, StepKind.DECODE, tuple(lens), bounds, draft_len))
        accepted = min(draft_len, most)
        unknown = draft_len - accepted
        for slot, length in lens.items():
            if draft_len:
                assert reader.cached[slot] >= length - 1
                # What was read beyond that is of no use any more: the drafts are written there.
                reader.cached[slot] = length + min(accepted, draft_len - 1) + 1
            lens[slot] = length + accepted + 1


def test_a_long_plain_phase_is_read_like_a_prompt() -> None:
    """One forward for 2,048 tokens of any rows, not one for 16 of each."""
    lens = {slot: 10 for slot in range(1, 31)}
    reader = Recorder(lens)
    for step in range(100):
        bounds = tuple(10 + step for _ in lens)
        reader.read(StepPlan(step, StepKind.DECODE, tuple(lens), bounds, 0))
    assert reader.num_forwards == 0, "a plain step costs nothing"
    reader._state.seq_len[:] = 110
    reader.read(StepPlan(100, StepKind.DECODE, tuple(lens), (110,) * 30, 3))
    assert reader.num_forwards == -(-30 * 99 // CHUNK)
    assert all(length >= 109 for length in reader.cached.values())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 70)), max_size=6), st.integers(1, 40))
def test_chunks_hold_the_same_tokens_in_order(rows: list[tuple[int, int]], most: int) -> None:
    pieces = [Piece(slot, *row) for slot, row in enumerate(rows)]
    chunks = list(chunked(pieces, most))
    tokens = [(p.slot, p.start + i) for chunk in chunks for p in chunk for i in range(p.length)]
    assert tokens == [(p.slot, p.start + i) for p in pieces for i in range(p.length)]
    sizes = [sum(p.length for p in chunk) for chunk in chunks]
    assert all(size == most for size in sizes[:-1]) and all(0 < size <= most for size in sizes)
