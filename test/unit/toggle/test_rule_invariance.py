"""Bad words, thinking budgets, stop patterns and logit processors under any schedule of modes: the text is
that of plain decode.

Run alone: ``pytest test/unit/toggle/test_rule_invariance.py -s`` (prints the counts). Many schedules:
``make test-long``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from helpers.grammar_world import compiler, with_grammars
from helpers.rules_world import RulesReference, with_rules
from helpers.scheduler_harness import Answer
from helpers.tiny_executor import tiny_executor
from helpers.toggle_reference import Reference
from helpers.toggle_schedule import ScheduleRun, make_schedule

from sglang.srt.constrained.grammar import spec_of
from sglang.srt.managers.io_struct import GenerateRequest

SHAPES = ((3, 1, 4), (2, 4, 16))  # steps, topk, draft tokens


def run_schedules(shapes: Sequence[tuple[int, int, int]], seeds: Sequence[int]) -> Counter[str]:
    sizes = {"page_size": 1, "max_total_tokens": 2048, "max_running_requests": 6}
    executors = [tiny_executor(shape, **sizes) for shape in shapes]
    plain = tiny_executor(None, max_total_tokens=512, max_running_requests=1)
    grammars = compiler("xgrammar")
    free, ruled = Reference(plain, allow_ties=False), RulesReference(plain, grammars)
    counts: Counter[str] = Counter()
    try:
        for seed in seeds:
            schedule = with_grammars(make_schedule(seed, 1, executors[0].info.num_pages), share=0.2)
            texts = {a.message.rid: free._generate(a.message, []) for a in schedule.arrivals}
            schedule = with_rules(schedule, lambda message, texts=texts: texts[message.rid])
            for executor in executors:
                outcome = ScheduleRun(executor, schedule, grammars).run()
                counts += outcome.steps
                counts["retractions"] += outcome.retractions
                for arrival in schedule.arrivals:
                    message, answer = arrival.message, outcome.answers[arrival.message.rid]
                    ruled.check(message, answer)
                    _count(counts, message, answer, texts[message.rid])
    finally:
        for executor in (*executors, plain):
            executor.shutdown()
    return counts


def _count(counts: Counter[str], message: GenerateRequest, answer: Answer, free_text: list[int]) -> None:
    assert answer.finish is not None and answer.stats is not None
    is_free = not (message.rules or message.processor or spec_of(message.sampling))
    counts["free requests"] += is_free
    counts["requests with a processor"] += message.processor is not None
    counts["requests with rules"] += message.rules is not None
    counts["changed by rules"] += message.rules is not None and free_text[: len(answer.ids)] != answer.ids
    counts["stopped by a pattern"] += answer.finish.matched in message.sampling.stop_regex
    counts["drafts accepted"] += 0 if is_free else answer.stats.spec_num_correct_drafts


def test_texts_are_those_of_plain_decode() -> None:
    counts = run_schedules(SHAPES, (42, 44, 45))
    print(f"\n{dict(counts)}")
    assert counts["plain"] and counts["spec"] and counts["retractions"] and counts["drafts accepted"]
    assert counts["requests with rules"] and counts["requests with a processor"]
    assert counts["free requests"] and counts["changed by rules"] and counts["stopped by a pattern"]


@pytest.mark.long
@pytest.mark.timeout(0)
def test_many_schedules() -> None:
    counts = run_schedules((*SHAPES, (5, 4, 8)), range(200_000, 200_600))
    print(f"\n{dict(counts)}")
    assert counts["changed by rules"] > 100 and counts["stopped by a pattern"] and counts["retractions"]
