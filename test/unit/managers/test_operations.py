"""Time limits, pauses, and the watchdog of the scheduler. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from helpers.scheduler_harness import SchedulerHarness
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.config_fields import ModelConfigError
from sglang.srt.distributed.shares import ShardingError
from sglang.srt.managers.executor_build import ExecutorArgsError
from sglang.srt.managers.executor_errors import is_for_user
from sglang.srt.managers.io_struct import ContinueRequest, PauseRequest
from sglang.srt.managers.pulse import Pulse, Watchdog
from sglang.srt.managers.scheduler_process import scheduler_config
from sglang.srt.model_executor.memory import OutOfMemoryError
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.model_loader.weight_source import WeightError
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.environment import seconds_from
from sglang.srt.utils.flags import ServerArgsError


def pause(harness: SchedulerHarness, retract: bool = False) -> None:
    harness.scheduler.receive(PauseRequest("p", retract))
    assert harness.replies[-1].ok
    harness.check_ownership()


def resume(harness: SchedulerHarness) -> None:
    harness.scheduler.receive(ContinueRequest("c"))
    assert harness.replies[-1].ok


def end_of(harness: SchedulerHarness, rid: str) -> Any:
    return harness.answers[rid].finish


# ---- time limits


def test_who_waits_too_long_is_refused_and_the_others_go_on() -> None:
    harness = SchedulerHarness(num_slots=1, waiting_timeout_s=2.0)
    first = harness.send([1, 2], max_new_tokens=100)
    harness.step()
    harness.step()  # it runs, which is no waiting
    second = harness.send([3], max_new_tokens=1)
    harness.run()
    finish = end_of(harness, second)
    assert (finish.type, finish.status_code) == ("abort", 503)
    assert "waited for more than 2 s (SGLANG_REQ_WAITING_TIMEOUT)" in finish.message
    assert end_of(harness, first).type == "length"
    harness.check_end()


@pytest.mark.parametrize("spec", [None, SpecShape(3)])
def test_who_runs_too_long_keeps_its_text_and_ends(spec: SpecShape | None) -> None:
    harness = SchedulerHarness(spec=spec, running_timeout_s=0.5)
    long = harness.send([1, 2], max_new_tokens=120)
    short = harness.send([3], max_new_tokens=3)
    harness.run()
    finish = end_of(harness, long)
    assert (finish.type, finish.status_code) == ("abort", 503)
    assert "run for more than 0.5 s (SGLANG_REQ_RUNNING_TIMEOUT)" in finish.message
    assert 0 < len(harness.answers[long].ids) < 120
    assert end_of(harness, short).type == "length"
    harness.check_end()


def test_the_time_of_admission_is_known() -> None:
    harness = SchedulerHarness()
    rid = harness.send([1], max_new_tokens=2)
    harness.run()
    stats = harness.answers[rid].stats
    assert stats is not None and stats.admitted_ts is not None and stats.first_token_ts is not None
    assert 0 < stats.admitted_ts < stats.first_token_ts


def test_limits_from_the_environment() -> None:
    assert seconds_from("X", {}) is seconds_from("X", {"X": "-1"}) is seconds_from("X", {"X": " "}) is None
    assert seconds_from("X", {"X": "2.5"}) == 2.5
    with pytest.raises(ServerArgsError, match="X must be a number of seconds, got 'soon'"):
        seconds_from("X", {"X": "soon"})


def test_the_environment_reaches_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    args, info = ServerArgs(model_path="m"), SchedulerHarness().info
    assert scheduler_config(args, info).waiting_timeout_s is None
    monkeypatch.setenv("SGLANG_REQ_WAITING_TIMEOUT", "3")
    monkeypatch.setenv("SGLANG_REQ_RUNNING_TIMEOUT", "4.5")
    config = scheduler_config(args, info)
    assert (config.waiting_timeout_s, config.running_timeout_s) == (3.0, 4.5)


def test_errors_for_the_user_are_known_by_their_names() -> None:
    for kind in (ModelConfigError, ShardingError, ExecutorArgsError, OutOfMemoryError, WeightError):
        assert is_for_user(kind.__new__(kind)), kind
    assert not is_for_user(RuntimeError("x")) and not is_for_user(AssertionError())


# ---- pause


@settings(max_examples=40, deadline=None)
@given(
    moments=st.lists(st.tuples(st.integers(0, 6), st.booleans()), max_size=6),
    overlap=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_pause_changes_no_answer(moments: list[tuple[int, bool]], overlap: bool, seed: int) -> None:
    def run(moments: list[tuple[int, bool]]) -> dict[str, list[int]]:
        harness = SchedulerHarness(
            spec=SpecShape(3), num_slots=3, num_pages=60, seed=seed, disable_overlap=not overlap
        )
        for i in range(5):
            harness.send([1 + i, 2], max_new_tokens=12, stream=bool(i % 2))
        for steps, retract in moments:
            for _ in range(steps):
                if harness.scheduler.has_work:
                    harness.step()
            pause(harness, retract)
            assert not harness.scheduler.has_work and harness.state()["is_paused"]
            assert not retract or not harness.scheduler.table.num_running
            harness.send([9], max_new_tokens=2, rid=f"late{len(harness.sent)}")
            resume(harness)
        harness.run()
        harness.check_end()
        return {rid: harness.answers[rid].ids for rid in ("r0", "r1", "r2", "r3", "r4")}

    assert run(moments) == run([])


def test_a_paused_server_aborts_and_flushes() -> None:
    harness = SchedulerHarness()
    rid = harness.send([1, 2, 3], max_new_tokens=50)
    other = harness.send([4, 5, 6], max_new_tokens=5)
    for _ in range(4):
        harness.step()
    pause(harness)
    assert not harness.flush_cache().ok  # their places are in use
    harness.abort(rid)
    assert end_of(harness, rid).type == "abort"
    pause(harness, retract=True)
    assert harness.flush_cache().ok
    assert harness.scheduler.pages.num_free == harness.info.num_pages
    resume(harness)
    harness.run()
    assert len(harness.answers[other].ids) == 5
    harness.check_end()


# ---- watchdog


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_watchdog_reports_once_and_then_ends() -> None:
    clock, hangs, dumps = Clock(), list[str](), list[float]()
    pulse = Pulse(clock)
    dog = Watchdog(pulse, 10.0, 2.0, hangs.append, lambda: dumps.append(clock.now))
    clock.now = 100.0
    assert not dog.check() and not dumps  # nothing to do is no hang
    pulse.begin()
    for now, reports in ((101.0, 0), (103.0, 1), (109.0, 1)):
        clock.now = now
        assert not dog.check() and len(dumps) == reports
    pulse.end()
    assert pulse.figures() == {"loop_turns": 1, "loop_turn_s": 0.0}
    pulse.begin()
    clock.now = 112.0
    assert not dog.check() and len(dumps) == 2  # another turn
    clock.now = 120.0
    assert dog.check() and hangs == ["a step has not ended for more than 10 s (--watchdog-timeout)"]


def test_the_watchdog_runs_beside_the_loop() -> None:
    hung = threading.Event()
    pulse = Pulse()
    Watchdog(pulse, 0.05, None, lambda _: hung.set(), lambda: None).start()
    pulse.begin()
    assert hung.wait(5)


def test_no_limit_no_end() -> None:
    clock = Clock()
    pulse = Pulse(clock)
    pulse.begin()
    clock.now = 1e9
    assert not Watchdog(pulse, None, None, pytest.fail).check()
