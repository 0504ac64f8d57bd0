"""Who goes first, who gives way, and who shares prefixes with whom. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import random
from typing import Any

import pytest
from helpers.scheduler_harness import SchedulerHarness
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.configs.priority_args import PriorityRules, priority_rules
from sglang.srt.entrypoints.scheduling_fields import cache_salt, scheduled
from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.flags import ServerArgsError


def resolved(*line: str) -> ServerArgs:
    return ServerArgs.from_command_line(["--model-path", "m", *line]).resolve("LlamaForCausalLM")


def order_of_ends(harness: SchedulerHarness) -> list[str]:
    ended: list[str] = []
    while harness.scheduler.has_work:
        harness.step()
        ended += [rid for rid, a in harness.answers.items() if a.finish is not None and rid not in ended]
    return ended


@pytest.mark.parametrize("low_first", [False, True])
def test_the_queue_is_in_the_order_of_priorities(low_first: bool) -> None:
    harness = SchedulerHarness(max_running_requests=1, priorities=PriorityRules(low_first, None))
    for rid, priority in (("first", 0), ("none", None), ("low", -5), ("high", 7), ("as low", -5)):
        harness.send([1, 2], rid=rid, max_new_tokens=3, priority=priority)
        harness.step()  # so the first one runs already
    expected = ["first", "low", "as low", "high"] if low_first else ["first", "high", "low", "as low"]
    assert order_of_ends(harness) == [*expected, "none"]
    harness.check_end()


def test_without_the_flag_a_priority_has_no_effect_or_is_refused() -> None:
    harness = SchedulerHarness(max_running_requests=1)
    for rid, priority in (("a", 0), ("b", -5), ("c", 7)):
        harness.send([1, 2], rid=rid, max_new_tokens=3, priority=priority)
    assert order_of_ends(harness) == ["a", "b", "c"]
    harness = SchedulerHarness(refuse_priorities=True)
    harness.send([1, 2], rid="a", priority=1)
    finish = harness.answers["a"].finish
    assert finish is not None and finish.status_code == 400 and "--enable-priority" in (finish.message or "")
    harness.send([1, 2], rid="b", max_new_tokens=2)
    harness.run()
    assert len(harness.answers["b"].ids) == 2


@pytest.mark.parametrize("disable_overlap", [False, True])
def test_a_much_higher_priority_takes_the_place_of_what_runs(disable_overlap: bool) -> None:
    rules = PriorityRules(preemption_threshold=10)
    harness = SchedulerHarness(
        max_running_requests=2, priorities=rules, disable_overlap=disable_overlap, spec=SpecShape(2)
    )
    harness.send([1, 2], rid="low", max_new_tokens=30, priority=0)
    harness.send([1, 3], rid="lower", max_new_tokens=30, priority=-1)
    for _ in range(4):
        harness.step()
    harness.send([1, 4], rid="not enough", max_new_tokens=2, priority=9)
    harness.send([1, 5], rid="enough", max_new_tokens=30, priority=10)
    for _ in range(3):
        harness.step()
    running = {request.rid for request in harness.scheduler.table.running()}
    assert running == {"low", "enough"}
    assert order_of_ends(harness)[-1] == "lower"
    stats = harness.answers["lower"].stats
    assert stats is not None and stats.num_retractions == 1
    harness.check_end()


def test_nobody_gives_way_where_that_makes_no_room() -> None:
    """Pages of a common prefix are there for others only when the last of those that share it has left."""
    harness = SchedulerHarness(num_pages=44, priorities=PriorityRules(preemption_threshold=0))
    prefix = list(range(1, 21))
    harness.send([*prefix, 30], max_new_tokens=1, priority=0)
    harness.run()
    sharing = [
        harness.send([*prefix, 31 + i], rid=f"sharing {i}", max_new_tokens=5, priority=priority)
        for i, priority in enumerate((0, 0, 50))
    ]
    harness.step()
    harness.step()
    harness.send(list(range(39, 17, -1)), rid="large", max_new_tokens=2, priority=10)
    harness.step()
    assert [request.rid for request in harness.scheduler.table.waiting] == ["large"]
    harness.run()
    for rid in sharing:
        stats = harness.answers[rid].stats
        assert stats is not None and stats.num_retractions == 0
    assert len(harness.answers["large"].ids) == 2
    harness.check_end()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), threshold=st.sampled_from((0, 3, None)))
def test_random_arrivals_of_all_priorities_are_answered_right(seed: int, threshold: int | None) -> None:
    rng = random.Random(seed)
    harness = SchedulerHarness(
        spec=SpecShape(2),
        num_slots=4,
        num_pages=rng.choice((48, 120)),
        disable_overlap=rng.random() < 0.3,
        max_running_requests=rng.choice((1, 3)),
        priorities=PriorityRules(rng.random() < 0.5, threshold),
    )
    for _ in range(12):
        ids = [1, 2, 3, 4][: rng.randint(1, 4)] + [rng.randrange(5, 40) for _ in range(rng.randint(0, 3))]
        harness.send(
            ids,
            max_new_tokens=rng.randint(1, 12),
            priority=rng.choice((None, -4, 0, 1, 9)),
            cache_salt=rng.choice(("", "a", "b")),
            sampling_seed=rng.randrange(100),
        )
        for _ in range(rng.randint(0, 3)):
            harness.step()
    harness.run()
    harness.check_end()


@pytest.mark.parametrize("spec", [None, SpecShape(2)])
def test_requests_of_two_salts_share_no_page(spec: SpecShape | None) -> None:
    harness = SchedulerHarness(spec=spec)
    prompt = list(range(1, 20))

    def cached(salt: str) -> int:
        rid = harness.send(prompt, max_new_tokens=2, cache_salt=salt)
        harness.run()
        stats = harness.answers[rid].stats
        assert stats is not None
        return stats.cached_tokens

    hit = len(prompt) - 1
    assert [cached(salt) for salt in ("", "a", "b", "a", "b", "")] == [0, 0, 0, hit, hit, hit]
    harness.check_end()


@given(*[st.text(st.sampled_from('ab",[]\\'), max_size=4)] * 4)
def test_no_two_pairs_of_salt_and_key_are_the_same(a: str, b: str, c: str, d: str) -> None:
    assert (cache_salt(a, b) == cache_salt(c, d)) == ((a, b) == (c, d))
    assert cache_salt(None, None) == ""


def test_fields_of_several_prompts() -> None:
    two = [TextRequest(text, SamplingParams()) for text in "xy"]
    made = scheduled(two, {"priority": [1, None], "extra_key": "k", "cache_salt": ["a", "b"]})
    assert [request.priority for request in made] == [1, None]
    assert len({request.cache_salt for request in made}) == 2
    wrong: list[dict[str, Any]] = [
        {"priority": "1"}, {"priority": True}, {"priority": [1]}, {"cache_salt": 5}, {"priority": 2**40},
        {"extra_key": "k" * 2000}, {"cache_salt": "\ud800"},
    ]  # fmt: skip
    for body in wrong:
        with pytest.raises(RequestError, match="priority|cache_salt"):
            scheduled(two, body)


def test_flags() -> None:
    assert priority_rules(resolved()) is None
    on = "--enable-priority-scheduling"
    assert priority_rules(resolved(on)) == PriorityRules(False, 10)
    line = [on, "--schedule-low-priority-values-first", "--priority-scheduling-preemption-threshold", "3"]
    assert priority_rules(resolved(*line)) == PriorityRules(True, 3)
    assert priority_rules(resolved(on, "--disable-priority-preemption")) == PriorityRules(False, None)
    assert resolved("--abort-on-priority-when-disabled").abort_on_priority_when_disabled
    for wrong in (
        ["--schedule-low-priority-values-first"],
        ["--disable-priority-preemption"],
        [on, "--abort-on-priority-when-disabled"],
        [on, "--priority-scheduling-preemption-threshold", "-1"],
    ):
        with pytest.raises(ServerArgsError, match="priority"):
            resolved(*wrong)
