"""A static batch: plans, overlap, and what is counted. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from helpers.tiny_executor import tiny_executor

from sglang.bench_one_batch_cases import (
    FaultyStep,
    ModeTimes,
    OneBatch,
    Step,
    decode_times,
    places_needed,
)
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import ExecutorInfo, StepPlan, StepResult

PROMPTS = [[5, 6, 7], [200] * 9, [1, 2, 3, 4, 5, 6, 90]]


@dataclass
class Watched:
    """An executor that remembers its plans, and how many steps were in flight with each."""

    inner: InProcessExecutor
    plans: list[StepPlan] = field(default_factory=list)
    flying: list[int] = field(default_factory=list)
    in_flight: int = 0

    @property
    def info(self) -> ExecutorInfo:
        return self.inner.info

    def launch(self, plan: StepPlan) -> Pending:
        self.in_flight += 1
        self.plans.append(plan)
        self.flying.append(self.in_flight)
        return Pending(self, self.inner.launch(plan))

    def shutdown(self) -> None:
        self.inner.shutdown()


@dataclass
class Pending:
    watched: Watched
    inner: object

    def wait(self) -> StepResult:
        self.watched.in_flight -= 1
        result: StepResult = self.inner.wait()  # type: ignore[attr-defined]
        return result


def _decoded(watched: Watched, lens: list[int], overlap: bool, output_len: int = 14) -> list[list[int]]:
    batch = OneBatch(watched, PROMPTS, places_needed(watched, 9, output_len))
    batch.prefill()
    batch.decode_all(lens, output_len, overlap)
    return [output[:output_len] for output in batch.outputs()]


@pytest.mark.parametrize("lens", [[0], [3], [3, 0], [1, 2, 0]])
def test_overlap_changes_when_and_not_what(lens: list[int]) -> None:
    watched = Watched(tiny_executor((3, 1, 4)))
    one_by_one = _decoded(watched, lens, overlap=False)
    assert max(watched.flying) == 1 and watched.in_flight == 0
    overlapped = _decoded(watched, lens, overlap=True)
    assert max(watched.flying) == 2 and watched.in_flight == 0
    plain = _decoded(watched, [0], overlap=True)
    watched.shutdown()
    assert one_by_one == overlapped == plain


def test_bounds_hold_with_a_step_in_flight() -> None:
    """A bound is never below the length that the device has, and no row goes beyond its pages."""
    watched, output_len = Watched(tiny_executor((3, 1, 4))), 20
    batch = OneBatch(watched, PROMPTS, places := places_needed(watched, 9, output_len))
    batch.prefill()
    before = len(watched.plans)
    steps = batch.decode_all([3], output_len)
    watched.shutdown()
    lens = {row.slot: len(row.prompt) for row in batch.rows}
    for plan, step in zip(watched.plans[before:], steps, strict=True):
        for slot, bound, count in zip(plan.decode_slots, plan.decode_len_bounds, step.counts, strict=True):
            assert lens[slot] <= bound <= lens[slot] + 4 and bound + 4 <= places
            lens[slot] += count


def test_a_plain_batch_runs_no_step_too_many() -> None:
    watched = Watched(tiny_executor())
    batch = OneBatch(watched, PROMPTS, places_needed(watched, 9, 10))
    batch.prefill()
    steps = batch.decode_all([0], 10)
    watched.shutdown()
    assert len(steps) == 9 and all(step.is_full for step in steps)
    assert [len(output) for output in batch.outputs()] == [10, 10, 10]


@pytest.mark.parametrize("prefill_tokens,num_steps", [(1, 19), (4, 5), (7, 3), (19, 1), (100, 1)])
@pytest.mark.parametrize("cut_len", [0, 2])
def test_prefill_in_parts(prefill_tokens: int, num_steps: int, cut_len: int) -> None:
    watched = Watched(tiny_executor((3, 1, 4)))
    expected = _decoded(watched, [3], overlap=True)
    watched.plans.clear()
    batch = OneBatch(watched, PROMPTS, places_needed(watched, 9, 14), prefill_tokens)
    batch.prefill(cut_len)
    assert cut_len or len(watched.plans) == num_steps
    assert all(sum(len(c.token_ids) for c in plan.prefill) <= prefill_tokens for plan in watched.plans)
    batch.decode_all([3], 14)
    watched.shutdown()
    assert [output[:14] for output in batch.outputs()] == expected


def test_a_cached_prefill_finds_its_pages() -> None:
    """After other batches too, whose outputs lie behind the prompts."""
    watched = Watched(tiny_executor((3, 1, 4)))
    places = places_needed(watched, 9, 14)
    expected = _decoded(watched, [3], overlap=True)
    for rows in (2, 3, 1):
        batch = OneBatch(watched, PROMPTS[:rows], places)
        watched.plans.clear()
        batch.prefill(cached=True)
        assert [len(c.token_ids) for plan in watched.plans for c in plan.prefill] == [1] * rows
        batch.decode_all([3, 0], 14)
        assert [output[:14] for output in batch.outputs()] == expected[:rows]
    watched.shutdown()


def _step(
    launched: float, done: float, counts: tuple[int, ...], draft_len: int = 0, full: bool = True
) -> Step:
    slots, device_s = tuple(range(1, len(counts) + 1)), (done - launched) / 2
    return Step(draft_len, slots, counts, full, launched, done, device_s, used_graph=draft_len != 3)


def test_decode_times_count_full_steps_from_the_end_of_the_first() -> None:
    steps = [
        _step(0.0, 10.0, (3, 4), 3),  # the pipeline fills
        _step(9.0, 11.0, (1, 1), 0),
        _step(10.5, 13.0, (2, 4), 3),
        _step(12.0, 14.0, (1, 1), 0),
        _step(13.5, 30.0, (3,), 3, full=False),
    ]
    times = decode_times(steps)
    assert times is not None
    assert (times.num_steps, times.wall_step_s) == (3, pytest.approx(4 / 3))
    assert times.tokens_per_s == pytest.approx((2 + 6 + 2) / 4)
    assert times.median_latency_s == 1.0
    assert times.tokens_per_row == pytest.approx(17 / 8) and times.eager_steps == 2
    assert times.modes == {0: ModeTimes(2, 1.0, 1.0), 3: ModeTimes(2, 3.125, 13 / 4)}


def test_one_full_step_has_to_do_and_none_says_so() -> None:
    times = decode_times([_step(1.0, 3.0, (2, 2)), _step(2.0, 9.0, (1,), full=False)])
    assert times is not None and (times.wall_step_s, times.tokens_per_s) == (2.0, 2.0)
    assert decode_times([_step(1.0, 3.0, (2,), full=False)]) is None


def test_the_step_that_finishes_the_first_row_is_the_last_full_one() -> None:
    watched = Watched(tiny_executor((3, 1, 4)))
    batch = OneBatch(watched, PROMPTS, places_needed(watched, 9, 40))
    batch.prefill()
    steps = batch.decode_all([3], 40)
    watched.shutdown()
    have = {row.slot: 1 for row in batch.rows}
    for step in steps:
        assert step.is_full == (max(have.values()) < 40)
        for slot, count in zip(step.slots, step.counts, strict=True):
            have[slot] += count
    assert not steps[-1].is_full and min(have.values()) >= 40


def test_logits_that_are_not_finite_end_the_run() -> None:
    watched = Watched(tiny_executor())
    batch = OneBatch(watched, PROMPTS, places_needed(watched, 9, 10))
    batch.prefill()
    watched.inner.worker.pools[0].poison(range(1, 9))
    with pytest.raises(FaultyStep, match="not finite"):
        batch.decode_all([0], 10)
    watched.shutdown()
