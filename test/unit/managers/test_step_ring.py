"""The last steps as a watcher sees them. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import threading

import pytest
from helpers.scheduler_harness import SchedulerHarness
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.managers.step_ring import RATE_WINDOW_S, StepRing, tokens_per_second
from sglang.srt.model_executor.step_plan import SpecShape


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 45))
def test_the_last_ones_come_in_order(length: int, num_steps: int, after: int) -> None:
    ring = StepRing(length)
    for number in range(1, num_steps + 1):
        ring.add(draft_len=number % 4, num_rows=number, num_tokens=2 * number, now=float(number))
    kept = range(max(0, num_steps - length) + 1, num_steps + 1)
    rows = [step.row for step in ring.after(after)]
    assert rows == [[number, number % 4, number, 2 * number] for number in kept if number > after]


@given(st.integers(2, 200), st.integers(1, 50), st.floats(0.01, 1.0))
def test_a_steady_rate_is_found(length: int, tokens: int, every_s: float) -> None:
    """With a ring shorter or longer than the window of the rate, which an end of a step may miss by one."""
    ring = StepRing(length)
    now = 0.0
    for _ in range(2 * length + 2):
        now += every_s
        ring.add(0, 1, tokens, now)
    rate = tokens_per_second(ring.after(0), now)
    in_window = min(length - 1, RATE_WINDOW_S / every_s)
    assert rate == pytest.approx(tokens / every_s, rel=1.01 / in_window)
    assert tokens_per_second(ring.after(0), now + RATE_WINDOW_S + 0.001) == 0
    assert tokens_per_second([], now) == 0


def test_reading_beside_a_writer() -> None:
    ring, done = StepRing(64), threading.Event()

    def write() -> None:
        for number in range(20_000):
            ring.add(number % 3, 1, 1, float(number))
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.is_set():
        numbers = [step.number for step in ring.after(0)]
        assert numbers == sorted(set(numbers))
    writer.join()
    assert [step.number for step in ring.after(0)] == list(range(19_937, 20_001))


def test_a_scheduler_tells_its_steps_and_load() -> None:
    harness = SchedulerHarness(spec=SpecShape(3), speculative_disable_bs_threshold=1)
    before = harness.scheduler.live(0)
    assert (before["last_step"], before["steps"], before["kv_used_tokens"]) == (0, [], 0)
    for _ in range(2):
        harness.send([1, 2, 3], max_new_tokens=20)
    harness.run()
    harness.send([4, 5], max_new_tokens=20)
    harness.run()
    live, counts = harness.scheduler.live(0), harness.state()["decode_steps"]
    modes = [draft_len > 0 for _, draft_len, _, _ in live["steps"]]
    assert (modes.count(False), modes.count(True)) == (counts["plain"], counts["spec"])
    assert all(rows <= 1 for _, draft_len, rows, _ in live["steps"] if draft_len)
    assert sum(tokens for *_, tokens in live["steps"]) == 3 * 19  # the first ones are a prefill's
    assert live["kv_capacity_tokens"] == harness.executor.info.num_pages
    middle = live["last_step"] - 5
    assert harness.scheduler.live(middle)["steps"] == live["steps"][-5:]
