"""Bad words, thinking budgets, stop patterns and logit processors under any schedule of modes: the text is
that of plain decode.

Run alone: ``pytest test/unit/toggle/test_rule_invariance.py -s`` (prints the counts). Many schedules:
``make test-long``.
"""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.grammar_world import compiler, with_grammars
from helpers.rules_world import RulesReference, with_rules
from helpers.tiny_executor import tiny_executor
from helpers.toggle_reference import Reference, Tally
from helpers.toggle_schedule import ScheduleRun, make_schedule

from sglang.srt.constrained.grammar import spec_of

SHAPES = ((3, 1, 4), (2, 4, 16))  # steps, topk, draft tokens


def run_schedules(shape: tuple[int, int, int], first_seed: int, count: int) -> Counter[str]:
    sizes = {"page_size": 1, "max_total_tokens": 2048, "max_running_requests": 6}
    executor = tiny_executor(shape, **sizes)
    plain = tiny_executor(None, max_total_tokens=512, max_running_requests=1)
    grammars = compiler("xgrammar")
    free, ruled = Reference(plain, allow_ties=False), RulesReference(plain, grammars)
    counts: Counter[str] = Counter()
    try:
        for seed in range(first_seed, first_seed + count):
            schedule = with_grammars(make_schedule(seed, 1, executor.info.num_pages), share=0.2)
            texts = {a.message.rid: free._generate(a.message, []) for a in schedule.arrivals}
            schedule = with_rules(schedule, lambda message, texts=texts: texts[message.rid])
            outcome = ScheduleRun(executor, schedule, grammars).run()
            counts += outcome.steps
            counts["retractions"] += outcome.retractions
            for arrival in schedule.arrivals:
                message, answer = arrival.message, outcome.answers[arrival.message.rid]
                if answer.finish is not None:
                    counts["stopped by a pattern"] += answer.finish.matched in message.sampling.stop_regex
                if not (message.rules or message.processor or spec_of(message.sampling)):
                    free.check(message, answer, Tally())
                    counts["free requests"] += 1
                    continue
                ruled.check(message, answer)
                counts["requests with a processor"] += message.processor is not None
                counts["requests with rules"] += message.rules is not None
                counts["changed by rules"] += texts[message.rid][: len(answer.ids)] != answer.ids
                if answer.stats is not None:
                    counts["drafts accepted"] += answer.stats.spec_num_correct_drafts
    finally:
        executor.shutdown()
        plain.shutdown()
    return counts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_texts_are_those_of_plain_decode(shape: tuple[int, int, int]) -> None:
    counts = run_schedules(shape, 42, 4)
    print(f"\n{shape}: {dict(counts)}")
    assert counts["plain"] and counts["spec"] and counts["retractions"] and counts["drafts accepted"]
    assert counts["requests with rules"] and counts["requests with a processor"]
    assert counts["free requests"] and counts["changed by rules"] and counts["stopped by a pattern"]


@pytest.mark.long
@pytest.mark.parametrize("shape", (*SHAPES, (5, 4, 8)), ids=str)
@pytest.mark.timeout(0)
def test_many_schedules(shape: tuple[int, int, int]) -> None:
    counts = run_schedules(shape, 200_000, 600)
    print(f"\n{shape}: {dict(counts)}")
    assert counts["changed by rules"] > 100 and counts["stopped by a pattern"] and counts["retractions"]
