"""What the host knows of a prefill step, against lists made token by token."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.model_executor.config import WorkerConfig
from sglang.srt.model_executor.slot_state import SlotState
from sglang.srt.model_executor.step_batch import prefill_inputs
from sglang.srt.model_executor.step_plan import PAD_PAGE, PageWrite, PrefillChunk, StepKind, StepPlan
from sglang.srt.utils.upload import ints, ranges, upload_all

CPU = torch.device("cpu")
chunks = st.builds(
    PrefillChunk,
    slot=st.integers(0, 9),
    start=st.integers(0, 50),
    token_ids=st.lists(st.integers(0, 1000), min_size=1, max_size=9).map(tuple),
    next_id=st.one_of(st.none(), st.integers(0, 1000)),
)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(chunks, min_size=1, max_size=4),
    st.lists(st.integers(1, 9), max_size=3, unique=True),
    st.booleans(),
)
def test_inputs(prefill: list[PrefillChunk], decode: list[int], with_pairs: bool) -> None:
    plan = StepPlan(1, StepKind.PREFILL, tuple(decode), (5,) * len(decode), prefill=tuple(prefill))
    got = prefill_inputs(plan, CPU, with_pairs)
    ids = [i for c in prefill for i in c.token_ids]
    at = [(c, i) for c in prefill for i in range(len(c.token_ids))]
    roots = [n for n, (c, i) in enumerate(at) if i == len(c.token_ids) - 1]
    num = len(decode)
    assert got.slots_cpu == (*decode, *(c.slot for c in prefill)) == tuple(got.slots.tolist())
    assert got.query.tolist() == [*range(num), *(num + n for n in roots)]
    assert got.token_ids.tolist() == ids
    assert got.positions.tolist() == [c.start + i for c, i in at]
    assert got.root_ids.tolist() == [ids[n] for n in roots]
    assert got.root_positions.tolist() == [got.positions[n] for n in roots]
    given_ids = [None] * num + [c.next_id for c in prefill]
    assert got.choosing_cpu == tuple(r for r, i in enumerate(given_ids) if i is None)
    assert got.choosing.tolist() == list(got.choosing_cpu)
    if len(got.choosing_cpu) == len(given_ids):
        assert got.given is None
    else:
        assert got.given is not None and got.given.tolist() == [i or 0 for i in given_ids]
    if not with_pairs:
        assert got.pairs is None
        return
    assert got.pairs is not None
    assert got.pairs.slots.tolist() == decode + [c.slot for c, _ in at]
    following = [0 if n in roots else ids[n + 1] for n in range(len(ids))]
    assert got.pairs.next_ids.tolist() == [0] * num + following


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5), max_size=5))
def test_one_copy_for_all(lists: list[list[int]]) -> None:
    tensors = upload_all([ints(part, len(part)) for part in lists], CPU)
    assert [t.tolist() for t in tensors] == lists
    assert all(t.data_ptr() % 16 == 0 for t in tensors)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) <= 1


def test_ranges() -> None:
    assert ranges(ints([5, 9, 0]), ints([2, 0, 3])).tolist() == [5, 6, 0, 1, 2]
    assert ranges(ints([]), ints([])).tolist() == []


def test_page_writes() -> None:
    state = SlotState(WorkerConfig(CPU, torch.float32, 3, 20, 1, 6, 10))
    state.write_pages(())
    state.write_pages((PageWrite(2, 1, (7, 8)), PageWrite(1, 0, (5,)), PageWrite(3, 4, ())))
    expected = torch.full_like(state.page_table, PAD_PAGE)
    expected[2, 1:3], expected[1, 0] = torch.tensor([7, 8]), 5
    assert torch.equal(state.page_table, expected)
