"""The scheduler's rules, one by one, on the fake executor."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.scheduler_harness import EOS, SchedulerHarness, decode

from sglang.srt.managers.intake import Intake
from sglang.srt.managers.io_struct import GenerateRequest
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.mem_cache.prefix_cache import prefix_keys
from sglang.srt.model_executor.step_plan import PrefillChunk, SpecShape, StepKind, StepPlan
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.toggle import Decision, ToggleInput, decide_by_threshold

CHAIN = SpecShape(3)
TREE = SpecShape(2, 4, 16)
BOTH_MODES = pytest.mark.parametrize("disable_overlap", [False, True])


def plans(harness: SchedulerHarness, kind: StepKind) -> list[StepPlan]:
    return [plan for plan in harness.executor.plans if plan.kind is kind]


def draft_lens(harness: SchedulerHarness) -> list[int]:
    return [plan.draft_len for plan in plans(harness, StepKind.DECODE)]


@BOTH_MODES
@pytest.mark.parametrize("spec", [None, CHAIN, TREE])
def test_serves_a_few_requests(spec: SpecShape | None, disable_overlap: bool) -> None:
    harness = SchedulerHarness(spec=spec, disable_overlap=disable_overlap, chunked_prefill_size=5)
    for count in range(1, 7):
        harness.send([count] * count, max_new_tokens=10 + count, stream=count % 2 == 0)
    harness.run()
    harness.check_end()
    assert {plan.kind for plan in harness.executor.plans} == {StepKind.PREFILL, StepKind.DECODE}


@BOTH_MODES
@pytest.mark.parametrize("spec", [None, TREE])
def test_a_limit_of_nothing_computes_the_prompt_alone(spec: SpecShape | None, disable_overlap: bool) -> None:
    harness = SchedulerHarness(spec=spec, disable_overlap=disable_overlap, chunked_prefill_size=5)
    for stream in (False, True):
        harness.send([*range(1, 13)], max_new_tokens=0, stream=stream, stop=("a",), ignore_eos=False)
    harness.send([3, 4], max_new_tokens=6)  # beside one that decodes
    harness.run()
    harness.check_end()
    assert [len(answer.ids) for answer in harness.answers.values()].count(0) == 2
    assert harness.cache.num_pages  # what was computed serves the next request


def _message(prompt: list[int]) -> GenerateRequest:
    """What ``send`` makes of a prompt, with room for 60 tokens."""
    params = SamplingParams(max_new_tokens=60, sampling_seed=1, ignore_eos=True)
    return GenerateRequest("", prompt, params, False, 0.0)


def test_overlap_launches_before_it_commits() -> None:
    for disable_overlap in (False, True):
        harness = SchedulerHarness(disable_overlap=disable_overlap)
        harness.send([1, 2], max_new_tokens=5, stream=True)
        seen = []
        while harness.scheduler.has_work:
            harness.step()
            seen.append((len(harness.executor.plans), sum(len(a.ids) for a in harness.answers.values())))
        if disable_overlap:
            assert seen == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
        else:
            assert seen == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (5, 5)]


def test_a_request_sure_to_finish_is_not_planned_again() -> None:
    harness = SchedulerHarness()
    harness.send([1, 2], max_new_tokens=1)
    harness.run()
    assert [plan.kind for plan in harness.executor.plans] == [StepKind.PREFILL]
    # One that stops by a token is stepped once more, and that step is not counted.
    ids, _, _ = harness.alone(_message([1, 2]))
    first = ids.index(ids[6])
    harness.send([1, 2], max_new_tokens=40, stop_token_ids=(ids[6],))
    harness.run()
    harness.check_end()
    assert len(plans(harness, StepKind.DECODE)) == first + 1
    assert harness.state()["decode_steps"] == {"plain": first, "spec": 0}


# ---- prefill ------------------------------------------------------------------------------------


def test_chunks_go_across_requests_within_the_budget() -> None:
    harness = SchedulerHarness(chunked_prefill_size=4)
    harness.send([1, 2, 3, 4, 5, 6], max_new_tokens=2)
    harness.send([7, 8, 9, 10, 11], max_new_tokens=2)
    harness.run()
    first, second, third = plans(harness, StepKind.PREFILL)
    assert first.prefill == (PrefillChunk(1, 0, (1, 2, 3, 4), 5),)
    assert second.prefill == (PrefillChunk(1, 4, (5, 6), None), PrefillChunk(2, 0, (7, 8), 9))
    assert third.prefill == (PrefillChunk(2, 2, (9, 10, 11), None),)
    assert [len(plan.admissions) for plan in (first, second, third)] == [1, 1, 0]
    assert [write.pages for write in first.page_writes] == [(1, 2, 3, 4, 5, 6)]


@pytest.mark.parametrize("chunk", [None, -1, 0])
def test_without_chunks_prompts_stay_whole(chunk: int | None) -> None:
    harness = SchedulerHarness(chunked_prefill_size=chunk, max_prefill_tokens=6)
    for length in (4, 3, 9):
        harness.send([1] * length, max_new_tokens=2)
    harness.run()
    lengths = [[len(c.token_ids) for c in plan.prefill] for plan in plans(harness, StepKind.PREFILL)]
    assert lengths == [[4], [3], [9 - 4]]  # the last one finds four tokens of itself in the cache


@pytest.mark.parametrize(("spec", "cached"), [(None, 5), (CHAIN, 5)])
def test_a_prefix_hit_never_covers_the_last_token(spec: SpecShape | None, cached: int) -> None:
    harness = SchedulerHarness(spec=spec)
    prompt = [1, 2, 3, 4, 5, 6]
    first, second = harness.send(prompt, max_new_tokens=4), ""
    harness.run()
    second = harness.send(prompt, max_new_tokens=4)
    harness.run()
    harness.check_end()
    stats = [harness.answers[rid].stats for rid in (first, second)]
    assert [s.cached_tokens for s in stats if s] == [0, cached]
    admission = harness.executor.plans[-5 if spec is None else -1].admissions
    assert all(a.cached_len == cached for a in admission)


def test_pair_keys_share_less_by_one() -> None:
    for spec, cached in ((None, 3), (CHAIN, 2)):
        harness = SchedulerHarness(spec=spec)
        harness.send([1, 2, 3, 4, 5, 6], max_new_tokens=4)
        harness.run()
        rid = harness.send([1, 2, 3, 9, 9, 9], max_new_tokens=4)
        harness.run()
        harness.check_end()
        stats = harness.answers[rid].stats
        assert stats is not None and stats.cached_tokens == cached


def test_the_next_turn_of_a_chat_finds_the_answer_before() -> None:
    harness = SchedulerHarness(spec=CHAIN)
    rid = harness.send([1, 2, 3], max_new_tokens=10)
    while harness.answers.get(rid) is None:
        harness.step()
    # The answer is out and a useless step may be in flight; the prefix is in the cache all the same.
    follow = harness.send([1, 2, 3, *harness.answers[rid].ids, 7], max_new_tokens=3)
    harness.run()
    harness.check_end()
    stats = harness.answers[follow].stats
    assert stats is not None and stats.cached_tokens >= 3 + 10 - 2


def test_without_a_cache_nothing_is_shared() -> None:
    harness = SchedulerHarness(use_cache=False)
    for _ in range(2):
        rid = harness.send([1, 2, 3, 4], max_new_tokens=3)
        harness.run()
    harness.check_end()
    stats = harness.answers[rid].stats
    assert stats is not None and stats.cached_tokens == 0 and harness.scheduler.pages.num_free == 200


def test_prefill_goes_first_and_mixed_chunks_run_together() -> None:
    for mixed in (False, True):
        harness = SchedulerHarness(spec=CHAIN, enable_mixed_chunk=mixed, chunked_prefill_size=4)
        harness.send([1, 2], max_new_tokens=40)
        harness.step()
        harness.step()
        harness.send([3] * 8, max_new_tokens=4)
        harness.run()
        harness.check_end()
        kinds = [plan.kind for plan in harness.executor.plans]
        assert kinds[:2] == [StepKind.PREFILL, StepKind.DECODE]
        assert kinds[2:4] == [StepKind.MIXED if mixed else StepKind.PREFILL] * 2
        assert all(plan.draft_len == 0 for plan in plans(harness, StepKind.MIXED))


def test_limits_of_running_requests() -> None:
    harness = SchedulerHarness(num_slots=8, max_running_requests=3)
    for index in range(6):
        harness.send([index], max_new_tokens=5)
    harness.step()
    assert harness.scheduler.table.num_running == 3 and len(harness.scheduler.table.waiting) == 3
    harness.run()
    harness.check_end()
    assert harness.state()["effective_max_running_requests_per_dp"] == 3


def test_tokens_that_wait_to_be_computed() -> None:
    harness = SchedulerHarness(num_slots=8, max_running_requests=2, chunked_prefill_size=4)
    for _ in range(3):
        harness.send([1] * 10, max_new_tokens=5)
    seen = [30]
    while seen[-1]:
        harness.step()
        seen.append(harness.scheduler.live(0)["num_pending_tokens"])
    assert 26 in seen and 10 in seen and seen == sorted(seen, reverse=True)
    harness.run()
    harness.check_end()


def test_a_drafter_changes_no_limit() -> None:
    harness = SchedulerHarness(spec=CHAIN, num_slots=128, num_pages=3000, max_spec_rows=4)
    for index in range(128):
        harness.send([index % 40, index // 40], max_new_tokens=5)
    harness.step()
    assert harness.scheduler.table.num_running == 128
    harness.run()
    harness.check_end()
    assert max(len(plan.decode_slots) for plan in harness.executor.plans) == 128


# ---- refusals -----------------------------------------------------------------------------------


def test_requests_that_can_never_run_are_refused_with_figures() -> None:
    harness = SchedulerHarness(context_len=20, num_pages=4, page_size=4)
    cases = [
        ([1] * 20, ("20 tokens", "context")),
        ([1] * 16, ("16 tokens", "KV cache")),
        ([], ("no tokens",)),
    ]
    cases += [([1, 40], ("0 … 39", "40")), ([-1], ("-1",))]
    for ids, says in cases:
        finish = harness.answers[harness.send(ids)].finish
        assert finish is not None and finish.type == "abort" and finish.status_code == 400
        assert finish.message is not None and all(part in finish.message for part in says)
    assert not harness.scheduler.has_work


def test_a_full_queue_refuses_with_503() -> None:
    harness = SchedulerHarness(num_slots=1, max_queued_requests=2)
    rids = [harness.send([1], max_new_tokens=3) for _ in range(3)]
    finish = harness.answers[rids[2]].finish
    assert finish is not None and finish.status_code == 503 and "2" in (finish.message or "")
    harness.run()
    harness.check_end()


def test_a_name_in_use_is_refused() -> None:
    harness = SchedulerHarness()
    harness.send([1], rid="same", max_new_tokens=3)
    harness.send([2], rid="same", max_new_tokens=3)
    assert harness.answers["same"].finish is not None
    assert harness.answers["same"].finish.status_code == 400


def test_length_is_bounded_by_the_context() -> None:
    for wanted in (None, 500):
        harness = SchedulerHarness(spec=CHAIN, context_len=20)
        rid = harness.send([1] * 6, max_new_tokens=wanted)
        harness.run()
        harness.check_end()
        assert len(harness.answers[rid].ids) == 14


# ---- out of pages -------------------------------------------------------------------------------


def test_retraction_takes_fewest_outputs_then_the_longest_prompt() -> None:
    harness = SchedulerHarness(num_pages=30, decode_reserve_tokens=1, disable_overlap=True, use_cache=False)
    old = harness.send([1, 1], max_new_tokens=20)
    for _ in range(4):
        harness.step()
    short, long = harness.send([2] * 5, max_new_tokens=12), harness.send([3] * 6, max_new_tokens=12)
    harness.run()
    harness.check_end()
    retractions = {rid: harness.answers[rid].stats.num_retractions for rid in (old, short, long)}  # type: ignore[union-attr]
    assert retractions[old] == 0 and retractions[long] >= 1 and retractions[short] <= retractions[long]
    comebacks = [a for plan in harness.executor.plans for a in plan.admissions if a.output_ids]
    assert comebacks and all(a.prompt_len in (5, 6) for a in comebacks)


@BOTH_MODES
@pytest.mark.parametrize("spec", [None, CHAIN, TREE])
@pytest.mark.parametrize("num_pages", range(18, 60, 3))
def test_retraction_at_every_point(num_pages: int, spec: SpecShape | None, disable_overlap: bool) -> None:
    harness = SchedulerHarness(
        spec=spec, num_pages=num_pages, decode_reserve_tokens=1, disable_overlap=disable_overlap, num_slots=4
    )
    for start in range(4):
        harness.send([start, 5, 6], max_new_tokens=14)
    harness.run()
    harness.check_end()
    assert all(answer.finish.type == "length" for answer in harness.answers.values() if answer.finish)


def test_a_retracted_request_comes_back_before_those_that_wait() -> None:
    harness = SchedulerHarness(num_pages=24, decode_reserve_tokens=1, use_cache=False, num_slots=2)
    for start in range(4):
        harness.send([start, start], max_new_tokens=16)
    harness.run()
    harness.check_end()
    prompts = [
        (plan.prefill[index].token_ids[0], bool(admission.output_ids))
        for plan in harness.executor.plans
        for index, admission in enumerate(plan.admissions)
    ]
    assert prompts[:3] == [(0, False), (1, False), (1, True)]  # not 2


def test_a_lone_request_uses_the_cache_instead_of_its_duplicates() -> None:
    harness = SchedulerHarness(num_pages=6, page_size=4, decode_reserve_tokens=1)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    harness.send(prompt, max_new_tokens=2)
    rid = harness.send(prompt, max_new_tokens=16)  # prefilled beside the first: two pages are there twice
    harness.run()
    harness.check_end()
    answer = harness.answers[rid]
    assert answer.finish is not None and answer.finish.type == "length"
    assert answer.stats is not None and answer.stats.num_retractions == 1


def test_a_lone_request_that_cannot_grow_ends_with_an_error() -> None:
    harness = SchedulerHarness(spec=CHAIN, num_pages=12)
    rid = harness.send([1, 2, 3], max_new_tokens=50)
    later = harness.send([4, 5], max_new_tokens=4)
    harness.run()
    harness.check_end()
    answer = harness.answers[rid]
    assert answer.finish is not None and answer.finish.status_code == 500
    assert "12 tokens" in (answer.finish.message or "") and len(answer.ids) == 12 + 1 - 3
    assert harness.answers[later].finish is not None and harness.answers[later].finish.type == "length"


def test_drafts_neither_retract_nor_evict() -> None:
    harness = SchedulerHarness(spec=CHAIN, num_pages=33, decode_reserve_tokens=1)
    harness.send([9] * 10, max_new_tokens=1)
    harness.run()
    assert harness.cache.num_pages == 9
    for start in range(2):
        harness.send([start, 5], max_new_tokens=10)
    harness.run()
    harness.check_end()
    switches = harness.state()["spec_switches_by_reason"]
    assert switches["plain:memory"] >= 1 and 3 in draft_lens(harness)
    assert all(answer.stats and answer.stats.num_retractions == 0 for answer in harness.answers.values())
    # 2 requests of 2 + 10 tokens fill 24 pages: plain decode needs no eviction, so there was none.
    assert harness.cache.match(_pairs([9] * 10)).pages and harness.scheduler._budget.num_evicted == 0


@pytest.mark.parametrize("threshold", [0, None])
def test_pages_are_added_for_many_steps_at_a_time_and_none_is_kept(threshold: int | None) -> None:
    harness = SchedulerHarness(
        spec=CHAIN, num_pages=2000, context_len=400, speculative_disable_bs_threshold=threshold
    )
    for start in range(4):
        harness.send([start, 5], max_new_tokens=160)
    harness.run()
    harness.check_end()
    decode = [plan for plan in harness.executor.plans if plan.decode_slots]
    adding = [plan for plan in decode if plan.page_writes]
    assert len(adding) < (len(decode) / 8 if threshold == 0 else len(decode) / 2)
    # No row ever had a page that its text could not reach, the step in flight at its longest, nor a draft.
    most = 2 + 160 - 1 + 2 * CHAIN.num_nodes(3)
    assert all(write.start + len(write.pages) <= most for plan in adding for write in plan.page_writes)


def _pairs(ids: list[int]) -> np.ndarray:
    return prefix_keys(ids, len(ids) - 1, pairs=True)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_full_cache_does_not_end_speculation(page_size: int) -> None:
    """A server that has run for a while has no free page; all are old prefixes."""
    harness = SchedulerHarness(spec=CHAIN, num_pages=2048 // page_size, page_size=page_size, context_len=300)
    for start in range(12):
        harness.send([start, start + 1] * 100, max_new_tokens=4)
    harness.run()
    assert harness.cache.num_pages > 0.9 * harness.info.num_pages
    before = len(draft_lens(harness))
    for start in range(20, 40):
        harness.send([start] * 10, max_new_tokens=60)
    harness.run()
    harness.check_end()
    later = draft_lens(harness)[before:]
    assert sum(length > 0 for length in later) > 0.9 * len(later)


# ---- the toggle ---------------------------------------------------------------------------------


def test_arriving_prefills_do_not_thrash_the_mode() -> None:
    """Waiting and prefilling requests never count: only rows that decode in the step do."""
    seen: list[tuple[int, int]] = []

    def policy(state: ToggleInput) -> Decision:
        decision = decide_by_threshold(state)
        seen.append((state.num_decoding, decision.draft_len))
        return decision

    harness = SchedulerHarness(
        spec=CHAIN, num_slots=4, max_running_requests=4, policy=policy, speculative_disable_bs_threshold=4,
        num_pages=800, context_len=300, chunked_prefill_size=4,
    )  # fmt: skip
    for start in range(4):
        harness.send([start], max_new_tokens=200)
    for start in range(10):
        harness.send([start] * 9, max_new_tokens=5)
    for _ in range(60):
        harness.step()
    assert {rows for rows, _ in seen} == {4} and {length for _, length in seen} == {3}
    assert harness.state()["spec_switches"] == 0
    harness.abort_all()
    harness.run()


def test_threshold_plus_and_minus_one() -> None:
    harness = SchedulerHarness(spec=CHAIN, speculative_disable_bs_threshold=2)
    for index, max_new in enumerate((60, 60, 20)):
        harness.send([index], max_new_tokens=max_new)
    harness.run()
    harness.check_end()
    rows = [(len(plan.decode_slots), plan.draft_len) for plan in plans(harness, StepKind.DECODE)]
    assert all((length == 3) == (count <= 2) for count, length in rows)
    assert harness.state()["spec_switches"] == 1


def test_a_mode_that_flips_every_step_is_harmless() -> None:
    lengths = iter([0, 3, 0, 1, 0, 2] * 100)

    def flip(state: ToggleInput) -> Decision:
        decision = decide_by_threshold(state)
        return Decision(min(decision.draft_len, next(lengths)), decision.reason)

    harness = SchedulerHarness(spec=CHAIN, policy=flip)
    for index in range(3):
        harness.send([index, 1], max_new_tokens=40)
    harness.run()
    harness.check_end()
    assert {0, 1, 2, 3} == set(draft_lens(harness))


def test_requests_capped_at_zero() -> None:
    harness = SchedulerHarness(spec=CHAIN)
    capped = harness.send([1], max_new_tokens=10, speculative_draft_len=0)
    harness.run()
    assert set(draft_lens(harness)) == {0}
    harness.send([1], max_new_tokens=10, speculative_draft_len=0, rid="again")
    free = harness.send([2], max_new_tokens=30)
    harness.run()
    harness.check_end()
    again, other = harness.answers["again"].stats, harness.answers[free].stats
    assert again is not None and other is not None and harness.answers[capped].stats is not None
    assert again.decode_steps_spec > 0 and again.spec_num_proposed_drafts == 0
    assert again.spec_correct_drafts_histogram == [again.decode_steps_spec]
    assert other.spec_num_proposed_drafts == 3 * other.spec_verify_ct


def test_the_threshold_changes_on_a_running_server() -> None:
    harness = SchedulerHarness(spec=CHAIN, max_spec_rows=5, speculative_disable_bs_threshold=4)
    assert harness.state()["speculative_disable_bs_threshold"] == 4
    for value in (0, 5, None):
        reply = harness.set_state(speculative_disable_bs_threshold=value)
        assert reply.ok and reply.body == {"speculative_disable_bs_threshold": value}
        assert harness.state()["speculative_disable_bs_threshold"] == value
    bad = [
        ({"speculative_disable_bs_threshold": 6}, "at most 5"),
        ({"speculative_disable_bs_threshold": -1}, "-1"),
    ]
    bad += [
        (
            {"pp_max_micro_batch_size": 1},
            "pp_max_micro_batch_size; accepted: speculative_disable_bs_threshold",
        )
    ]
    bad += [({}, "accepted"), ({"speculative_disable_bs_threshold": 3, "other": 1}, "other")]
    for change, says in bad:
        reply = harness.set_state(**change)
        assert not reply.ok and says in reply.error
        assert harness.state()["speculative_disable_bs_threshold"] is None
    assert not SchedulerHarness().set_state(speculative_disable_bs_threshold=1).ok


# ---- ends ---------------------------------------------------------------------------------------


@BOTH_MODES
@pytest.mark.parametrize("spec", [None, CHAIN])
@pytest.mark.parametrize("when", range(12))
def test_abort_at_every_point(when: int, spec: SpecShape | None, disable_overlap: bool) -> None:
    harness = SchedulerHarness(
        spec=spec, disable_overlap=disable_overlap, chunked_prefill_size=4, num_slots=2, page_size=2
    )
    victim = harness.send([1, 2, 3, 4, 5, 6, 7, 8, 9], max_new_tokens=8)
    other = harness.send([1, 2, 3, 4, 9], max_new_tokens=12)
    waiting = harness.send([1, 2, 3], max_new_tokens=2)
    for _ in range(when):
        harness.step()
    done = harness.answers.get(victim) is not None
    harness.abort(victim)
    harness.abort("unknown")
    finish = harness.answers[victim].finish
    assert finish is not None and (done or finish.type == "abort")
    harness.run()
    harness.check_end()
    assert all(harness.answers[rid].finish.type == "length" for rid in (other, waiting))  # type: ignore[union-attr]


def test_a_stop_string_inside_an_accepted_run() -> None:
    plain = SchedulerHarness()
    ids, _, _ = plain.alone(_message([1, 2]))
    for accepted in range(4):
        for end in range(4, 20):
            harness = SchedulerHarness(spec=CHAIN)
            harness.executor.accept_counts.extend([accepted] * 60)
            text = decode(ids[:end])
            harness.send([1, 2], max_new_tokens=60, stop=(text[-4:],))
            harness.run()
            harness.check_end()
            # The ids cut off are nowhere: the next request with this prefix goes its own way.
            harness.send([1, 2, *ids[: end + 2]], max_new_tokens=6)
            harness.run()
            harness.check_end()


def test_a_row_that_is_not_finite_ends_alone() -> None:
    harness = SchedulerHarness(spec=CHAIN)
    bad, good = harness.send([1, 2, 3], max_new_tokens=20), harness.send([4, 5], max_new_tokens=20)
    for _ in range(4):
        harness.step()
    harness.executor.fault_slots.append(1)
    harness.run()
    finish = harness.answers[bad].finish
    assert finish is not None and finish.type == "abort" and finish.status_code == 500
    assert harness.answers[good].finish is not None and harness.answers[good].finish.type == "length"
    harness.check_end()
    known = [1, 2, 3, *harness.answers[bad].ids]
    assert len(known) > 4 and harness.cache.match(_pairs([*known, 0])).pages == _shared_prompt(harness)


def _shared_prompt(harness: SchedulerHarness) -> tuple[int, ...]:
    """What was shared when [1, 2, 3] had been prefilled, and so before the fault."""
    return harness.cache.match(_pairs([1, 2, 3])).pages


def test_flush_only_when_idle() -> None:
    harness = SchedulerHarness(spec=CHAIN)
    ids, _, _ = harness.alone(_message([1, 2, 3, 4]))
    rid = harness.send([1, 2, 3, 4], max_new_tokens=40, stop_token_ids=(ids[9],))
    harness.step()
    reply = harness.flush_cache()
    assert not reply.ok and "pending requests" in reply.error and "#running-req: 1" in reply.error
    while harness.answers.get(rid) is None:
        harness.step()
    assert "avg_spec_accept_length" in harness.state()
    assert harness.scheduler.has_work  # a step that nobody needs is on its way
    assert harness.flush_cache().ok
    assert harness.cache.num_pages == 0 and harness.scheduler.pages.num_free == 200
    assert "avg_spec_accept_length" not in harness.state()
    harness.run()
    harness.check_end()


# ---- what comes out -----------------------------------------------------------------------------


def test_streaming_intervals() -> None:
    harness = SchedulerHarness(stream_interval=4)
    default = harness.send([1], max_new_tokens=10, stream=True)
    own = harness.send([2], max_new_tokens=10, stream=True, stream_interval=1)
    whole = harness.send([3], max_new_tokens=10)
    harness.run()
    harness.check_end()
    assert [harness.answers[rid].num_outputs for rid in (default, own, whole)] == [4, 10, 1]  # 1 + 4 + 4 + 1


def test_figures_look_at_speculative_steps_alone() -> None:
    harness = SchedulerHarness(spec=CHAIN, disable_overlap=True)
    harness.executor.accept_counts.extend([3, 0, 1, 3, 3])
    rid = harness.send([1, 2], max_new_tokens=15)
    for _ in range(4):
        harness.step()  # prefill, then 4 + 1 + 2 tokens
    harness.set_state(speculative_disable_bs_threshold=0)
    for _ in range(3):
        harness.step()  # 3 tokens
    harness.set_state(speculative_disable_bs_threshold=None)
    harness.run()  # 4 of 4 tokens, though the limit is reached
    harness.check_end()
    stats = harness.answers[rid].stats
    assert stats is not None
    assert (stats.decode_steps_plain, stats.decode_steps_spec, stats.spec_verify_ct) == (3, 4, 4)
    assert stats.spec_tokens == 4 + 1 + 2 + 4 and stats.completion_tokens == 15
    assert (stats.spec_num_correct_drafts, stats.spec_num_proposed_drafts) == (3 + 0 + 1 + 3, 12)
    assert stats.spec_correct_drafts_histogram == [1, 1, 0, 2]
    assert stats.first_token_ts is not None
    state = harness.state()
    assert state["decode_steps"] == {"plain": 3, "spec": 4} and state["spec_draft_len"] == 3
    assert state["spec_switches"] == 2 and state["avg_spec_accept_length"] == 11 / 4
    assert state["spec_accept_by_position"] == [0.75, 0.5, 0.5]
    assert state["memory_usage"]["token_capacity"] == 200


def test_a_step_that_nobody_needed_does_not_hide_a_change_by_hand() -> None:
    harness = SchedulerHarness(spec=CHAIN)
    harness.executor.accept_counts.extend([0] * 20)
    ids, _, _ = harness.alone(_message([1, 2, 3, 4]))
    end = next(index for index in range(3, 20) if ids[index] not in ids[:index])
    rid = harness.send([1, 2, 3, 4], max_new_tokens=40, stop_token_ids=(ids[end],))
    for _ in range(end + 1):
        harness.step()
    assert rid not in harness.answers
    harness.set_state(speculative_disable_bs_threshold=0)
    harness.step()  # launches a plain step, and then hears that the request has ended
    assert rid in harness.answers and harness.executor.plans[-1].draft_len == 0
    harness.send([5, 6], max_new_tokens=9)
    harness.run()
    assert harness.state()["decode_steps"] == {"plain": 8, "spec": end}
    assert harness.state()["spec_switches_by_reason"] == {"plain:manual": 1}


def test_the_last_decode_step_may_be_a_mixed_one() -> None:
    harness = SchedulerHarness(
        spec=CHAIN, disable_overlap=True, enable_mixed_chunk=True, chunked_prefill_size=8
    )
    harness.send([1, 2], max_new_tokens=30)
    harness.step()
    harness.step()
    assert harness.state()["spec_draft_len"] == 3
    harness.send([3, 4], max_new_tokens=30)
    harness.step()
    assert harness.executor.plans[-1].kind == "mixed"
    assert harness.state()["spec_draft_len"] == 0


def test_how_a_slot_is_told_to_sample() -> None:
    harness = SchedulerHarness()
    harness.send(
        [1], max_new_tokens=9, temperature=0.0, min_new_tokens=2, stop_token_ids=(7,), ignore_eos=False
    )
    harness.send([2], max_new_tokens=9, top_k=1, ignore_eos=False)
    harness.send([3], max_new_tokens=9, temperature=0.5, top_p=0.9, logit_bias=((1, 2.0),), sampling_seed=9)
    harness.step()
    first, second, third = (a.sampling for a in harness.executor.plans[0].admissions)
    assert first.temperature == 0.0 and first.suppressed_ids == (EOS, 7) and first.min_new_tokens == 2
    assert second.temperature == 0.0 and second.suppressed_ids == ()
    assert (third.temperature, third.top_p, third.logit_bias, third.seed) == (0.5, 0.9, ((1, 2.0),), 9)


def test_drain_answers_everything() -> None:
    harness = SchedulerHarness(spec=CHAIN)
    for index in range(5):
        harness.send([index], max_new_tokens=5)
    harness.scheduler.drain()
    assert not harness.scheduler.has_work and not harness.scheduler.step()
    harness.check_end()


def test_ids_outside_the_vocabulary_are_refused_or_passed_over() -> None:
    """They would index past a row of logits: an assertion in the executor, which ends the process."""
    harness = SchedulerHarness()
    vocab = harness.info.vocab_size
    bad = [harness.send([5, 6], logit_bias=((token, 1.0),)) for token in (-1, vocab)]
    good = harness.send([5, 6], stop_token_ids=(vocab + 7,), min_new_tokens=2, max_new_tokens=4)
    harness.run()
    for rid in bad:
        finish = harness.answers[rid].finish
        assert finish is not None and finish.status_code == 400 and "logit_bias" in (finish.message or "")
    assert len(harness.answers[good].ids) == 4


def test_a_model_that_names_no_real_id_as_its_end() -> None:
    """``eos_token_id: -1`` in a config: with min_new_tokens the executor would index a logit by it."""
    intake = Intake(SchedulerHarness().info, StopChecker((-1, EOS), decode))
    params = SamplingParams(min_new_tokens=2, stop_token_ids=(7,))
    request = intake.make(GenerateRequest("r", [1], params, False, 0.0))
    assert request.sampling.suppressed_ids == (EOS, 7) and request.stop_ids == {-1, EOS, 7}
