"""Grammars under any schedule of modes: the text is that of plain decode alone, and the grammar holds.

Run alone: ``pytest test/unit/toggle/test_grammar_invariance.py -s`` (prints the counts). Thousands of
schedules: ``make test-long``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.grammar_world import GrammarReference, compiler, with_grammars
from helpers.tiny_executor import tiny_executor
from helpers.toggle_reference import Reference, Tally
from helpers.toggle_schedule import ScheduleRun, make_schedule

from sglang.srt.constrained.grammar import spec_of

SHAPES = ((3, 1, 4), (2, 4, 16))  # steps, topk, draft tokens
BACKENDS = ("xgrammar", "llguidance")


def run_schedules(shape: tuple[int, int, int], backend: str, first_seed: int, count: int) -> Counter[str]:
    sizes = {"page_size": 1, "max_total_tokens": 2048, "max_running_requests": 6}
    executor = tiny_executor(shape, **sizes)
    plain = tiny_executor(None, max_total_tokens=512, max_running_requests=1)
    grammars = compiler(backend)
    free, constrained = Reference(plain, allow_ties=False), GrammarReference(plain, grammars)
    counts: Counter[str] = Counter()
    try:
        for seed in range(first_seed, first_seed + count):
            schedule = with_grammars(make_schedule(seed, 1, executor.info.num_pages))
            outcome = ScheduleRun(executor, schedule, grammars).run()
            counts += outcome.steps
            counts["retractions"] += outcome.retractions
            for arrival in schedule.arrivals:
                message, answer = arrival.message, outcome.answers[arrival.message.rid]
                if spec_of(message.sampling) is None:
                    free.check(message, answer, Tally())
                    counts["free requests"] += 1
                    continue
                counts["complete texts"] += constrained.check(message, answer)
                counts["requests with a grammar"] += 1
                if answer.stats is not None:
                    counts["drafts accepted"] += answer.stats.spec_num_correct_drafts
    finally:
        executor.shutdown()
        plain.shutdown()
    return counts


@pytest.mark.parametrize("shape,backend", list(zip(SHAPES, BACKENDS, strict=True)), ids=str)
def test_texts_are_those_of_plain_decode(shape: tuple[int, int, int], backend: str) -> None:
    counts = run_schedules(shape, backend, 42, 4)
    print(f"\n{backend} {shape}: {dict(counts)}")
    assert counts["plain"] and counts["spec"] and counts["complete texts"] and counts["free requests"]
    assert counts["drafts accepted"] and counts["retractions"]


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", (*SHAPES, (5, 4, 8)), ids=str)
@pytest.mark.timeout(0)
def test_many_schedules(shape: tuple[int, int, int], backend: str) -> None:
    counts = run_schedules(shape, backend, 100_000, 700)
    print(f"\n{backend} {shape}: {dict(counts)}")
    assert counts["complete texts"] > 100 and counts["retractions"]
