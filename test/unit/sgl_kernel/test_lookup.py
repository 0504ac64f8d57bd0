"""Drafts out of a row's own text: the reference against the CPU server's (kernels: ``test_speculation``)."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kernel.speculation.lookup.ops import (
    look_up,
    look_up_launches,
    note,
    note_launch,
)
from sgl_kernel.testing.compile_gate import check
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


def test_they_fit() -> None:
    pytest.importorskip("triton", reason="kernels need triton")

    def meta(*shape: int, dtype: torch.dtype = I64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    texts, packed = meta(65, 131_080, dtype=I32), meta(16, 8)
    for launch in look_up_launches(texts, meta(16), meta(16), meta(16, 6), LONGEST_MATCH, pdl=True):
        check(launch)
    check(note_launch(texts, meta(16), meta(16), packed[:, :-2], meta(16), 0, pdl=True), archs=(120,))
