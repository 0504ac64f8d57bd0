"""Requests whose grammars are being compiled, or can't go on. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

import threading
import time
from typing import Any

from helpers.grammar_world import byte_vocabulary, compiled, compiler
from helpers.scheduler_harness import SchedulerHarness
from helpers.tiny_executor import tiny_executor
from helpers.toggle_schedule import Arrival, Schedule, ScheduleRun

from sglang.srt.constrained.compiling import GrammarCompiler
from sglang.srt.constrained.grammar import CompiledGrammar, GrammarError, GrammarKind, GrammarSpec
from sglang.srt.managers.grammars import DEAD_END, NO_BACKEND, Grammars
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.sampling.sampling_params import SamplingParams


class GatedBackend:
    """The grammar "slow" is found wrong when the gate opens, everything else at once."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        if spec.text == "slow":
            assert self.gate.wait(20)
        raise GrammarError(f"{spec.text} is wrong")


def with_backend(**config: Any) -> tuple[SchedulerHarness, GatedBackend]:
    harness, backend = SchedulerHarness(**config), GatedBackend()
    scheduler = harness.scheduler
    grammars = GrammarCompiler(lambda: (backend, byte_vocabulary()))
    scheduler._grammars = Grammars(grammars, scheduler.table, scheduler._finisher, lambda ids: "", 256)
    return harness, backend


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    harness, backend = with_backend()
    held = harness.send([5, 6], regex="slow")
    free = harness.send([5, 6], max_new_tokens=9)
    began = time.monotonic()
    while free not in harness.answers or harness.answers[free].finish is None:
        harness.step()
    harness.check_answer(free)
    assert time.monotonic() - began < 10 and held not in harness.answers
    assert harness.scheduler._committer.load().num_grammar_queued == 1
    assert harness.scheduler.has_work and harness.scheduler.step()  # waits a moment, and says so
    wrong = harness.send([7], regex="nonsense")
    backend.gate.set()
    harness.run()
    for rid, name in ((held, "slow"), (wrong, "nonsense")):
        finish = harness.answers[rid].finish
        assert finish is not None and (finish.status_code, finish.message) == (400, f"{name} is wrong")
    assert harness.scheduler.table.is_empty and not harness.scheduler._grammars.is_compiling


def test_a_held_request_can_be_aborted_and_counts_as_queued() -> None:
    harness, backend = with_backend(max_queued_requests=1)
    held = harness.send([5, 6], regex="slow")
    refused = harness.send([5, 6])
    finish = harness.answers[refused].finish
    assert finish is not None and finish.status_code == 503
    harness.abort(held)
    finish = harness.answers[held].finish
    assert finish is not None and finish.type == "abort" and finish.status_code is None
    backend.gate.set()
    harness.run()
    assert not harness.scheduler.table.held and harness.answers[held].num_outputs == 1


def test_without_a_backend_grammars_are_refused() -> None:
    harness = SchedulerHarness()
    finish = harness.answers[harness.send([5], ebnf='root ::= "a"')].finish
    assert finish is not None and (finish.status_code, finish.message) == (400, NO_BACKEND)


def test_a_grammar_that_no_token_can_follow_ends_its_request_alone() -> None:
    """M's byte is an end token's here: the vocabulary can't spell it."""
    grammars = compiler("llguidance")
    specs = [GrammarSpec(GrammarKind.REGEX, text) for text in ("abcM", "x{5}")]
    for spec in specs:
        compiled(grammars, spec)
    arrivals = tuple(
        Arrival(0, GenerateRequest(f"r{i}", [9, 8, 7], _greedy(spec), False, received_ts=0.0), None)
        for i, spec in enumerate(specs)
    )
    executor = tiny_executor((3, 1, 4))
    schedule = Schedule(0, arrivals, SchedulerConfig(max_running_requests=4), 200, False, (), 3)
    try:
        answers = ScheduleRun(executor, schedule, grammars).run().answers
    finally:
        executor.shutdown()
    dead, fine = answers["r0"], answers["r1"]
    assert bytes(dead.ids) == b"abc" and dead.finish is not None
    assert (dead.finish.status_code, dead.finish.message) == (400, DEAD_END)
    assert bytes(fine.ids[:5]) == b"xxxxx" and fine.finish is not None and fine.finish.type == "stop"


def _greedy(spec: GrammarSpec) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=20, sampling_seed=1, **spec.params())
