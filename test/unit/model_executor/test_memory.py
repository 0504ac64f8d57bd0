"""How many pages fit, by tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.plan_driver import PlanDriver
from helpers.tiny_executor import tiny_executor

from sglang.srt.model_executor.config import max_positions
from sglang.srt.model_executor.dry_run import largest_prefill, prefill_tokens, small_prefills
from sglang.srt.model_executor.memory import (
    DeviceMemory,
    OutOfMemoryError,
    PageBudget,
    available_bytes,
    default_chunk,
)
from sglang.srt.model_executor.step_plan import PAD_SLOT, SpecShape

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


def test_steps_keep_their_memory(caplog: pytest.LogCaptureFixture) -> None:
    budget = replace(BUDGET, num_slots=100)  # half of 80,000 bytes: 100 pages, one of them the pad page
    assert replace(budget, step_bytes=39_000).num_pages() == 99  # they fit into the other half
    large = replace(budget, mem_fraction=0.9)
    assert large.num_pages() == 179
    assert replace(large, step_bytes=20_000).num_pages() == 149
    assert caplog.messages == []
    assert replace(large, step_bytes=50_000).num_pages() == 99  # but no more than half
    assert "a lower --max-running-requests makes sure" in caplog.text
    with pytest.raises(OutOfMemoryError, match="3 MiB available, 1 MiB of them kept for steps"):
        replace(
            large, available_bytes=3 << 20, step_bytes=1 << 20, max_total_tokens=10**6, num_slots=10**5
        ).num_pages()


def test_more_tokens_than_can_be_used_are_cut_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    assert replace(BUDGET, max_total_tokens=2 * 64).num_pages() == 32
    assert caplog.messages == []
    assert replace(BUDGET, max_total_tokens=200).num_pages() == 32
    (line,) = caplog.messages
    assert line.startswith("--max-total-tokens 200 is more than 2 requests of 50 tokens can use: ")
    assert line.endswith("holds 128")


def test_the_host_has_memory() -> None:
    assert 2**24 < available_bytes(torch.device("cpu")) < 2**50


GPU = DeviceMemory(total=1000, free=790, own=200, activations=50, graphs=30)


@pytest.mark.parametrize(
    "changes, fraction, expected",
    [
        ({}, 0.9, 900 - 200 - 30),
        ({}, 0.5, 500 - 200 - 30),
        ({"activations": 150}, 0.9, 790 - 30 - 150),  # more than the rest: the pool pays
        ({"free": 300}, 0.9, 300 - 30 - 50),  # others use the GPU too
        ({"own": 950, "free": 40}, 0.9, 0),
    ],
)
def test_the_pool_gets_what_is_left(changes: dict[str, int], fraction: float, expected: int) -> None:
    assert replace(GPU, **changes).for_kv(fraction) == expected


def test_chunks_of_a_gpu() -> None:
    assert [default_chunk(size << 30) for size in (24, 80, 96, 141)] == [8192, 8192, 16384, 16384]
    assert default_chunk(100 * 10**9) == 8192


@pytest.mark.parametrize(
    "num_tokens, num_slots, context_len, num_rows, longest",
    [(16, 4, 100, 4, 4), (18, 4, 100, 4, 5), (3, 8, 100, 3, 1), (1000, 2, 10, 2, 10)],
)
def test_the_largest_prefill(
    num_tokens: int, num_slots: int, context_len: int, num_rows: int, longest: int
) -> None:
    plan = largest_prefill(num_tokens, num_slots, context_len)
    lengths = [len(chunk.token_ids) for chunk in plan.prefill]
    assert sum(lengths) == min(num_tokens, num_slots * context_len)
    assert len(lengths) == num_rows and max(lengths) == longest and min(lengths) >= longest - 1
    assert all(chunk.slot == PAD_SLOT and chunk.is_last for chunk in plan.prefill)
    assert [chunk.start for chunk in plan.prefill] == [context_len - lengths[0]] + [0] * (num_rows - 1)


@pytest.mark.parametrize(
    ("num_slots", "num_decode"),
    [(1, [1]), (6, [3, 6]), (40, [3, 15, 31, 40]), (256, [3, 15, 31, 63, 127, 255, 256])],
)
def test_small_prefills(num_slots: int, num_decode: list[int]) -> None:
    plans = small_prefills((1, 4, 16, 32), num_slots, 20)
    alone, mixed = plans[:5], plans[5:]
    assert [len(plan.prefill[0].token_ids) for plan in alone] == [1, 4, 16, 20, 20], "of a context"
    assert [len(plan.decode_slots) for plan in mixed] == num_decode
    assert {slot for plan in mixed for slot in plan.decode_slots} == {PAD_SLOT}


def test_trial_prefills_run_and_change_no_request() -> None:
    driver = PlanDriver(tiny_executor((3, 1, 4)), poison=False)
    request, other = driver.add([1, 2, 3]), driver.add([1, 2, 3])
    driver.generate([request], 8, 3)
    worker = driver.executor.worker
    for plan in (largest_prefill(100, 8, 20), *small_prefills((1, 4), 8, 20)):
        worker.execute(plan)
    driver.generate([other], 8, 3)
    assert other.output == request.output and not other.faulty
    assert int(worker.state.seq_len[PAD_SLOT]) == 1


def test_tokens_of_a_prefill_step() -> None:
    assert prefill_tokens(8192, 16384, 1000) == 8192
    assert prefill_tokens(8192, 4096, 1000) == 4096
    assert prefill_tokens(-1, 16384, 1000) == 16384
    assert prefill_tokens(-1, 16384, 131072) == 131072
