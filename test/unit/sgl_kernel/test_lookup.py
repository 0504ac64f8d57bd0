"""Drafts out of a row's own text: the reference against the CPU server's, kernels against the reference."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.speculation.lookup.ops import (
    BLOCK,
    look_up,
    look_up_launches,
    look_up_ref,
    note,
    note_launch,
)
from sgl_kernel.testing.compile_gate import check
from sgl_kernel.testing.interpret import interpret
from sglang.srt.model_executor.drafter import DraftContext
from sglang.srt.speculative.history import TokenHistory
from sglang.srt.speculative.ngram_worker import LONGEST_MATCH, NgramWorker

I32, I64 = torch.int32, torch.int64


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.lists(st.integers(-1, 3), min_size=2, max_size=40), min_size=1, max_size=5),
    num_drafts=st.integers(1, 7),
)
def test_the_reference_is_the_server_s(texts: list[list[int]], num_drafts: int) -> None:
    history = TokenHistory(len(texts) + 1, 48, torch.device("cpu"), unknown=-1)
    for slot, text in enumerate(texts, start=1):
        history.ids[slot, : len(text)] = torch.tensor(text)
    slots, root = torch.arange(1, len(texts) + 1), torch.tensor([len(text) - 1 for text in texts])
    last = history.ids[slots, root]
    context = DraftContext(slots, root, int(root.max()), last, torch.empty(0), False)
    expected = NgramWorker(history).draft(context, num_drafts).tokens
    tokens = torch.cat((last[:, None], torch.full((len(texts), num_drafts), 99)), 1)
    assert torch.equal(look_up(history.ids.to(I32), slots, root, tokens, LONGEST_MATCH), expected)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), num_columns=st.integers(1, 5))
def test_noted_texts(seed: int, num_columns: int) -> None:
    """What is noted and nothing else; padding, and what no room is left for, is not."""
    check_note(seed, num_columns)


def check_note(seed: int, num_columns: int) -> None:
    rng = random.Random(seed)
    ids = torch.full((5, 9), -1, dtype=I32)
    expected = ids.clone()
    slots, root = rng.sample(range(5), 4), [rng.randrange(9) for _ in range(4)]
    counts = [rng.randint(0, num_columns) for _ in range(4)]
    tokens = torch.randint(0, 99, (4, num_columns + 2), generator=torch.Generator().manual_seed(seed))
    for row, slot in enumerate(slots):
        for column in range(counts[row]):
            if slot and root[row] + 1 + column < 9:
                expected[slot, root[row] + 1 + column] = tokens[row, column]
    note(ids, torch.tensor(slots), torch.tensor(root), tokens[:, :num_columns], torch.tensor(counts))
    assert torch.equal(ids, expected)


def body_kernels() -> None:
    """Texts in one part and in many, with matches of every length at the borders of parts and blocks."""
    for seed in range(6):
        check_note(seed, 1 + seed % 4)
    g = torch.Generator().manual_seed(3)
    for width, lens in (
        (40, [1, 2, 3, 33, 40]),
        (5 * BLOCK, [1, BLOCK, BLOCK + 1, 3 * BLOCK + 7, 5 * BLOCK]),
    ):
        ids = torch.randint(0, 3, (7, width), generator=g).to(I32)
        ids[2, width // 2 :] = torch.arange(width - width // 2) % 7  # a loop
        ids[4, ::5] = -1
        slots = torch.tensor([0, 1, 2, 3, 4, 5])
        root = torch.tensor([0, *(length - 1 for length in lens)])
        for begin in (BLOCK - 3, BLOCK, 2 * BLOCK - 1):
            if begin + 20 < width - 20:  # the only long match is at a border
                ids[5, begin : begin + 12] = ids[5, width - 12 :]
                ids[5, begin + 12 : begin + 16] = torch.tensor([7, 8, 9, 6])
        for num_drafts in (1, 5):
            own = torch.full((6, num_drafts + 2), 99, dtype=I64)
            expected = own.clone()
            look_up(ids, slots, root, own[:, : num_drafts + 1], LONGEST_MATCH)
            look_up_ref(ids, slots[1:], root[1:], expected[1:, : num_drafts + 1], LONGEST_MATCH)
            assert torch.equal(own[1:], expected[1:])


def test_kernels_equal_the_reference() -> None:
    pytest.importorskip("triton", reason="kernels need triton")
    interpret(__file__, "body_kernels")


def test_they_fit() -> None:
    pytest.importorskip("triton", reason="kernels need triton")

    def meta(*shape: int, dtype: torch.dtype = I64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    texts, packed = meta(65, 131_080, dtype=I32), meta(16, 8)
    for launch in look_up_launches(texts, meta(16), meta(16), meta(16, 6), LONGEST_MATCH, pdl=True):
        check(launch)
    check(note_launch(texts, meta(16), meta(16), packed[:, :-2], meta(16), 0, pdl=True), archs=(120,))
