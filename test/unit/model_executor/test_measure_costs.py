"""Costs of steps measured at the start. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.plan_driver import PlanDriver
from helpers.tiny_executor import tiny_executor
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.model_executor.graph_sizes import GraphKey
from sglang.srt.model_executor.measure_costs import (
    CPU_EFFORT,
    CUDA_EFFORT,
    HostStopwatch,
    Stopwatch,
    WorkerTimer,
    bisecting,
    captured_order,
    eager_order,
    kv_lens,
    measure,
    measure_costs,
    measure_ragged,
    ragged_order,
)
from sglang.srt.model_executor.step_plan import GraphSet, StepCost
from sglang.srt.model_executor.worker import Worker
from sglang.srt.speculative.cost_table import CostTable


class KnownSteps:
    """A device whose steps take what ``seconds_of`` says; ``now`` is its clock."""

    def __init__(self, seconds_of: Callable[[GraphKey, int], float]) -> None:
        self._seconds_of = seconds_of
        self.now = 0.0
        self.asked: list[tuple[GraphKey, int]] = []

    def seconds(self, key: GraphKey, kv_len: int) -> float:
        self.asked.append((key, kv_len))
        seconds = self._seconds_of(key, key.rows * kv_len)
        self.now += seconds
        return seconds

    def clock(self) -> float:
        return self.now


KEYS = captured_order([GraphSet(0, (1, 2, 4, 8), 0.0, 0), GraphSet(3, (1, 2, 4), 0.0, 0)])


@given(
    fixed=st.floats(1e-4, 1.0),
    a_row=st.floats(0.0, 0.1),
    a_token=st.floats(0.0, 1e-6),
    lens=st.tuples(st.integers(1, 64), st.integers(65, 4096)),
    one_token_cost=st.booleans(),
)
def test_a_cost_that_is_linear_is_found(
    fixed: float, a_row: float, a_token: float, lens: tuple[int, int], one_token_cost: bool
) -> None:
    def seconds(key: GraphKey, tokens: int) -> float:
        return fixed * (1 + key.draft_len) + a_row * key.rows + a_token * tokens

    effort = replace(CUDA_EFFORT, budget_s=1e9, one_token_cost=one_token_cost)
    costs = measure(KEYS, KnownSteps(seconds), lambda key: lens, effort)
    assert [(c.draft_len, c.rows) for c in costs] == [(0, 1), (0, 2), (0, 4), (0, 8), (3, 1), (3, 2), (3, 4)]
    for cost in costs:
        key = GraphKey(cost.draft_len, cost.rows)
        for tokens in (0, 1000):
            at_least = 0.1 * seconds(key, cost.rows * lens[0])  # the fixed part is never thought to be less
            wanted = max(seconds(key, 0), at_least) + a_token * tokens
            assert cost.fixed_s + cost.per_kv_token_s * tokens == pytest.approx(wanted, rel=1e-3)


def test_longer_rows_are_never_thought_cheaper() -> None:
    steps = KnownSteps(lambda key, tokens: 1.0 - 1e-5 * tokens)
    costs = measure(KEYS, steps, lambda key: (10, 100), CUDA_EFFORT, steps.clock)
    assert all(cost.per_kv_token_s == 0.0 and cost.fixed_s > 0 for cost in costs)


def test_when_time_runs_out_the_rest_lies_between() -> None:
    sizes = tuple(range(1, 42))
    keys = captured_order([GraphSet(0, sizes, 0.0, 0), GraphSet(2, sizes, 0.0, 0)])
    steps = KnownSteps(lambda key, tokens: 0.1 + 0.01 * key.rows + 1e-6 * tokens)
    costs = measure(keys, steps, lambda key: (10, 100), replace(CUDA_EFFORT, budget_s=5.0), steps.clock)
    assert 5.0 < steps.now < 7.0 and len(steps.asked) < len(keys)
    assert [(c.draft_len, c.rows) for c in costs] == [(k, rows) for k in (0, 2) for rows in sizes]
    for cost in costs:
        assert cost.fixed_s == pytest.approx(0.1 + 0.01 * cost.rows, rel=1e-6)
        assert cost.per_kv_token_s == pytest.approx(1e-6, rel=1e-6)


def test_beyond_what_was_timed_steps_grow_as_those_of_another_length() -> None:
    keys = eager_order((1, 2, 3), num_slots=20, max_spec_rows=16)
    assert [(key.rows, key.draft_len) for key in keys] == [(rows, k) for rows in (1, 16, 4) for k in range(4)]
    steps = KnownSteps(lambda key, tokens: (1.0 + key.draft_len) * (1.0 + key.rows))
    effort = replace(CPU_EFFORT, budget_s=50.0)  # ends behind one draft and 16 rows
    costs = measure(keys, steps, lambda key: (10, 10), effort, steps.clock)
    assert len({key for key, _ in steps.asked}) == 6
    assert [(c.draft_len, c.rows) for c in costs] == [(k, rows) for k in range(4) for rows in (1, 4, 16)]
    for cost in costs:
        assert cost.fixed_s == pytest.approx((1.0 + cost.draft_len) * (1.0 + cost.rows))


RAGGED = (
    GraphSet(0, (64,), 0.0, 0),
    GraphSet(3, (32, 64), 0.0, 0, ((32, 64), (32, 80), (64, 128), (64, 160))),
)


def test_ragged_steps_are_timed_over_short_rows_and_their_kv_costs_what_it_costs_the_others() -> None:
    def seconds(key: GraphKey, tokens: int) -> float:
        return 1.0 + 0.01 * (key.tokens or key.rows * (key.draft_len + 1)) + 1e-5 * tokens

    steps, keys = KnownSteps(seconds), ragged_order(RAGGED)
    common = measure(captured_order(RAGGED), steps, lambda key: (10, 100), CUDA_EFFORT)
    costs = measure_ragged(
        keys, common, steps, lambda key: (10, 100), replace(CUDA_EFFORT, ragged_budget_s=99.0)
    )
    assert {(c.draft_len, c.rows, c.tokens) for c in costs} == {(3, *size) for size in RAGGED[1].ragged}
    for cost in costs:
        assert cost.fixed_s == pytest.approx(1.0 + 0.01 * cost.tokens)
        assert cost.per_kv_token_s == pytest.approx(1e-5)
    assert CostTable.from_costs([*common, *costs], padded=True).ragged == costs


def test_ragged_steps_that_time_leaves_out_are_not_made_up() -> None:
    steps, keys = KnownSteps(lambda key, tokens: 1.0), ragged_order(RAGGED)
    common = measure(captured_order(RAGGED), steps, lambda key: (10, 100), CUDA_EFFORT)
    effort = replace(CUDA_EFFORT, ragged_budget_s=2.5)
    began = steps.now
    costs = measure_ragged(keys, common, steps, lambda key: (10, 100), effort, lambda: steps.now - began)
    assert [GraphKey(c.draft_len, c.rows, c.tokens) for c in costs] == keys[:3]
    assert measure_ragged(keys, [], steps, lambda key: (10, 100), CUDA_EFFORT, steps.clock) == ()


def test_a_size_that_no_length_was_timed_at_is_not_made_up() -> None:
    steps = KnownSteps(lambda key, tokens: 1.0 * key.rows)
    keys = eager_order((1,), num_slots=20, max_spec_rows=5)
    costs = measure(keys, steps, lambda key: (10, 10), replace(CPU_EFFORT, budget_s=1.5), steps.clock)
    assert [(c.draft_len, c.rows, c.fixed_s) for c in costs] == [(0, 1, 1.0), (1, 1, 1.0)]


@given(st.integers(1, 200))
def test_bisecting_names_all_the_ends_first(count: int) -> None:
    order = list(bisecting(count))
    assert sorted(order) == list(range(count)) and set(order[:2]) == {0, count - 1}
    gaps = sorted(order[: max(2, count // 2)])
    assert all(after - before <= 8 for before, after in zip(gaps, gaps[1:], strict=False))


@pytest.mark.parametrize("shape", [None, (3, 1, 4), (2, 4, 16)], ids=str)
def test_the_state_is_as_before(shape: tuple[int, int, int] | None) -> None:
    executor = tiny_executor(shape, max_total_tokens=300, page_size=4)
    worker: Worker = executor.worker
    driver = PlanDriver(executor)
    driver.generate([driver.add([5, 6, 7]), driver.add([8, 9])], 6)
    state = worker.state
    before = {name: value.clone() for name, value in vars(state).items() if isinstance(value, torch.Tensor)}
    sampling = {n: v.clone() for n, v in vars(worker.sampler.states).items() if isinstance(v, torch.Tensor)}
    assert {"seq_len", "next_token", "draft_feature", "page_table"} == set(before)
    keys = eager_order(executor.info.draft_lens, 8, executor.info.max_spec_rows)
    costs = measure_costs(worker, keys, CPU_EFFORT, HostStopwatch())
    assert {cost.draft_len for cost in costs} == {0, *executor.info.draft_lens}
    for owner, values in ((state, before), (worker.sampler.states, sampling)):
        assert all(torch.equal(getattr(owner, name), value) for name, value in values.items())


def test_rows_are_as_long_as_asked_and_read_pages_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = tiny_executor((3, 1, 4), max_total_tokens=400, page_size=4)
    worker = executor.worker
    seen: list[tuple[list[int], int, int]] = []
    execute = worker.execute

    def noting(plan: object) -> object:
        state = worker.state
        pages = state.page_table[1:3, : -(-(20 + 4) // 4)]
        seen.append((state.seq_len[1:3].tolist(), pages.unique().numel(), int(pages.min())))
        return execute(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "execute", noting)
    timer = WorkerTimer(worker, HostStopwatch(), CPU_EFFORT)
    with torch.inference_mode():
        assert timer.seconds(GraphKey(3, 2), 20) > 0
    assert seen == [([20, 20], 12, 1)] * 3, "once to warm up, twice to be timed, each from the same state"
    assert kv_lens(worker.config, GraphKey(3, 2), CPU_EFFORT) == (16, 192)
    assert kv_lens(worker.config, GraphKey(0, 100), CPU_EFFORT) == (1, 1), "there is no room for more"


class LateStopwatch(Stopwatch):
    """Of a device that runs later than it is told: asking for a time before the end of the runs waits."""

    def __init__(self) -> None:
        self.marks = 0
        self.marks_when_asked: list[int] = []

    def mark(self) -> int:
        self.marks += 1
        return self.marks

    def seconds(self, begin: int, end: int) -> float:
        self.marks_when_asked.append(self.marks)
        return float(end - begin)


def test_a_device_is_asked_for_times_when_all_runs_are_launched() -> None:
    watch = LateStopwatch()
    timer = WorkerTimer(tiny_executor().worker, watch, CUDA_EFFORT)
    with torch.inference_mode():
        assert timer.seconds(GraphKey(0, 1), 5) == 1.0 and timer.seconds(GraphKey(0, 1), 9) == 1.0
    assert watch.marks == 2 * (4 + 3), "the first run of a size does not count"
    assert watch.marks_when_asked == [8] * 3 + [14] * 3


def test_an_executor_measures_only_when_told_to() -> None:
    assert tiny_executor((3, 1, 4)).info.costs == ()
    info = tiny_executor((3, 1, 4), measure_costs=True, capture_max_bs=4).info
    assert info.draft_lens == (1, 2, 3)
    assert [(c.draft_len, c.rows) for c in info.costs] == [(k, rows) for k in range(4) for rows in (1, 4)]
    assert all(isinstance(cost, StepCost) and cost.fixed_s > 0 for cost in info.costs)
