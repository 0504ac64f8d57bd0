"""How many pages fit, by tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sglang.srt.model_executor.config import max_positions
from sglang.srt.model_executor.memory import OutOfMemoryError, PageBudget, available_bytes
from sglang.srt.model_executor.step_plan import SpecShape

SPEC = SpecShape(3)
BUDGET = PageBudget(
    page_size=4,
    bytes_per_place=100,
    num_slots=2,
    context_len=50,
    spec=SPEC,
    max_total_tokens=None,
    mem_fraction=0.5,
    available_bytes=80_000,
)


def test_positions_leave_room_for_one_step_too_many() -> None:
    assert max_positions(50, None) == 53
    assert max_positions(50, SPEC) == 50 + 8 + 4
    assert max_positions(50, SpecShape(5, 4, 8)) == 50 + 12 + 8


@pytest.mark.parametrize(
    "changes,pages",
    [
        ({}, 2 * 16),  # all slots at their longest: 62 places are 16 pages each
        ({"num_slots": 100}, 99),  # 40,000 bytes are 100 pages, one of them the pad page
        ({"num_slots": 100, "mem_fraction": 0.25}, 49),
        ({"max_total_tokens": 60}, 15),
        ({"max_total_tokens": 10**9}, 32),
        ({"spec": None}, 2 * 14),
        ({"page_size": 1, "num_slots": 100}, 399),
    ],
)
def test_pages(changes: dict[str, object], pages: int) -> None:
    assert replace(BUDGET, **changes).num_pages() == pages  # type: ignore[arg-type]


def test_too_little_memory_is_said_with_numbers() -> None:
    with pytest.raises(
        OutOfMemoryError, match="no request fits: it needs 16 tokens; there is room for 4 tokens"
    ):
        replace(BUDGET, available_bytes=1600).num_pages()
    with pytest.raises(OutOfMemoryError, match="no request fits"):
        replace(BUDGET, max_total_tokens=8).num_pages()
    with pytest.raises(OutOfMemoryError, match="--max-total-tokens 500 does not fit; there is room for 396"):
        replace(BUDGET, num_slots=100, max_total_tokens=500).num_pages()


def test_the_host_has_memory() -> None:
    assert 2**24 < available_bytes(torch.device("cpu")) < 2**50
