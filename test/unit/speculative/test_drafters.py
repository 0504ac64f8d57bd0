"""Every kind of drafter: its cache is exact after any history, and its drafts change no token. float64."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.plan_driver import GREEDY, DrivenRequest, PlanDriver
from helpers.tiny_executor import tiny_executor

from sglang.srt.model_executor.drafter import DraftContext, DraftTree
from sglang.srt.model_executor.step_plan import PageWrite, SlotAdmission, SlotSampling
from sglang.srt.speculative.history import TokenHistory
from sglang.srt.speculative.ngram_worker import LONGEST_MATCH, NgramWorker

PROMPT = [5, 9, 200, 31, 8, 8, 100]
WARM = SlotSampling(temperature=1.0, seed=2)
CHAIN, TREE = (3, 1, 4), (3, 3, 9)  # steps, topk, draft tokens
KINDS = {  # family, drafter, shape
    "speculators": ("llama", "speculators", TREE),
    "eagle3-mla": ("kimi-k2.5", "eagle3-mla", CHAIN),
    "eagle3-mla-tree": ("deepseek-v3", "eagle3-mla", TREE),
    "nextn-deepseek": ("deepseek-v3", "nextn", CHAIN),
    "nextn-glm4": ("glm4-moe", "nextn", TREE),
    "nextn-glm5": ("glm-5", "nextn", CHAIN),
    "nextn-glm5-tree": ("glm-5", "nextn", TREE),
    "standalone": ("llama", "standalone", CHAIN),
    "ngram": ("llama", "ngram", CHAIN),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def make(kind: str, page_size: int = 2) -> PlanDriver:
    family, drafter, shape = KINDS[kind]
    return PlanDriver(tiny_executor(shape, family, drafter=drafter, page_size=page_size))


@cache
def plain(family: str) -> PlanDriver:
    return PlanDriver(tiny_executor(None, family))


def expected(family: str, prompt: list[int], sampling: SlotSampling, count: int) -> list[int]:
    driver = plain(family)
    request = driver.add(prompt, sampling)
    output = driver.generate([request], count)[0]
    driver.release(request)
    return output


def caches(driver: PlanDriver, request: DrivenRequest) -> list[torch.Tensor]:
    """[layers, L, …] each: what the pools hold of the committed positions. A draft model's of its own is
    filled when it drafts, and its drafts tell whether it is right."""
    size, pools = driver.info.page_size, driver.executor.worker.pools
    places = [request.pages[t // size] * size + t % size for t in range(request.seq_len)]
    kept = pools[:1] if driver.info.wants_ids else pools
    return [tensor[:, places] for pool in kept for tensor in pool.tensors]


def drafts(driver: PlanDriver, request: DrivenRequest) -> DraftTree:
    """What would be drafted now; the state stays as it is."""
    driver.reserve(request, request.seq_len + 20)
    worker, spec = driver.executor.worker, driver.info.spec
    slots = torch.tensor([request.slot])
    assert worker.drafter is not None and spec is not None
    with torch.inference_mode():
        ctx = DraftContext(
            slots,
            worker.state.seq_len[slots].long(),
            request.seq_len,
            worker.state.next_token[slots],
            worker.state.draft_feature[slots],
            request.sampling.temperature > 0,
        )
        return worker.drafter.draft(ctx, spec.num_steps)


def check_warm(driver: PlanDriver, request: DrivenRequest) -> None:
    """Against a new request whose prompt is everything known but the last id."""
    fresh = DrivenRequest(
        driver.free_slots.pop(), list(request.prompt), request.sampling, request.output[:-1]
    )
    for plan in driver.prefill_plans(fresh):
        driver.run(plan, [fresh])
    assert fresh.output == request.output
    for ours, theirs in zip(caches(driver, request), caches(driver, fresh), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    feature = driver.executor.worker.state.draft_feature
    torch.testing.assert_close(feature[request.slot], feature[fresh.slot], rtol=1e-9, atol=1e-9)
    ours, theirs = drafts(driver, request), drafts(driver, fresh)
    assert ours.tokens.equal(theirs.tokens) and ours.parents.equal(theirs.parents)
    driver.release(fresh)


@EACH
def test_tokens_and_caches_after_steps_of_all_modes(kind: str) -> None:
    driver, (family, _, shape) = make(kind), KINDS[kind]
    rng = random.Random(1)
    samplings = (WARM, GREEDY)
    requests = [driver.add(PROMPT, WARM, chunk=3), driver.add(PROMPT[:3], GREEDY)]
    for _ in range(2):
        for _ in range(5):
            driver.step(requests, rng.choice([0, 1, shape[0], shape[0]]))
        for request in requests:
            check_warm(driver, request)
    for request, sampling in zip(requests, samplings, strict=True):
        assert request.output == expected(family, request.prompt, sampling, len(request.output))
        assert not request.faulty
    if kind != "ngram":  # a text that does not repeat itself can't be guessed by it
        assert max(max(request.counts) for request in requests) > 1, (
            "no draft was accepted: this says nothing"
        )


@EACH
def test_after_a_prefix_hit_on_shared_pages(kind: str) -> None:
    """Two requests share the pages of a prompt; the first speculates on while the second begins."""
    driver, (family, _, shape) = make(kind), KINDS[kind]
    first = driver.add(PROMPT, WARM)
    driver.generate([first], 5, shape[0])
    second = DrivenRequest(driver.free_slots.pop(), list(PROMPT), GREEDY, pages=first.pages[:3])
    plan = driver.plan(prefill=[(second, 6, 7)])
    shared = PageWrite(second.slot, 0, tuple(first.pages[:3]))
    admission = SlotAdmission(second.slot, len(PROMPT), 6, GREEDY, known_ids=tuple(PROMPT))
    driver.run(replace(plan, admissions=(admission,), page_writes=(shared, *plan.page_writes)), [second])
    driver.generate([first, second], 12, shape[0])
    check_warm(driver, first)
    check_warm(driver, second)
    assert first.output == expected(family, PROMPT, WARM, len(first.output))
    assert second.output == expected(family, PROMPT, GREEDY, len(second.output))


@EACH
def test_drafting_leaves_the_committed_cache_alone(kind: str) -> None:
    driver = make(kind)
    request = driver.add(PROMPT, WARM)
    driver.generate([request], 8, KINDS[kind][2][0])
    before = [cache.clone() for cache in caches(driver, request)]
    drafts(driver, request)
    assert all(map(torch.equal, caches(driver, request), before))


def test_a_slot_s_next_life_knows_nothing_of_the_last() -> None:
    """A draft model of its own reads what its cache lacks, however much that is."""
    driver = make("standalone", page_size=1)
    first = driver.add([7] * 30, GREEDY)
    driver.generate([first], 20, 3)
    slot = first.slot
    driver.release(first)
    second = driver.add(PROMPT, WARM)
    assert second.slot == slot
    driver.generate([second], 30)  # plainly: nothing was noted but tokens
    check_warm(driver, second)
    driver.generate([second], 60, 3)
    assert second.output == expected("llama", PROMPT, WARM, len(second.output))


def ngram_drafts(texts: list[list[int]], draft_len: int) -> list[list[int]]:
    width = max(map(len, texts)) + 5
    history = TokenHistory(len(texts) + 1, width, torch.device("cpu"), unknown=-1)
    slots = torch.arange(1, len(texts) + 1)
    worker = NgramWorker(history)
    for slot, text in enumerate(texts, start=1):
        worker.admit([SlotAdmission(slot, len(text), 0, GREEDY, known_ids=tuple(text[:1]))])
        of_text = torch.full((len(text) - 1,), slot)
        positions, following = torch.arange(len(text) - 1), torch.tensor(text[1:])
        worker.sync(following, torch.empty(0), of_text, positions)
    lens = torch.tensor([len(text) - 1 for text in texts])
    next_token = torch.tensor([text[-1] for text in texts])
    ctx = DraftContext(slots, lens, int(lens.max()), next_token, torch.empty(0), False)
    tree = worker.draft(ctx, draft_len)
    assert tree.mask is None and tree.tokens[:, 0].equal(next_token)
    return tree.tokens[:, 1:].tolist()


def by_hand(text: list[int], draft_len: int) -> list[int]:
    """The latest of the longest matches, and what followed it."""

    def agreeing(place: int) -> int:
        count = 0
        while count < min(LONGEST_MATCH, place + 1) and text[place - count] == text[len(text) - 1 - count]:
            count += 1
        return count

    last = len(text) - 1
    best = max(range(last), key=lambda place: (agreeing(place), place))
    longer = list(text)
    for step in range(draft_len):
        longer.append(longer[best + 1 + step])
    return longer[len(text) :]


@pytest.mark.parametrize("seed", range(20))
def test_ngram_drafts_are_what_followed_the_longest_match(seed: int) -> None:
    rng = random.Random(seed)
    texts = [[rng.randrange(rng.choice((2, 3, 9))) for _ in range(rng.randint(2, 60))] for _ in range(6)]
    texts.append([4, 5, 6] * 6)  # a loop goes on
    draft_len = rng.randint(1, 7)
    assert ngram_drafts(texts, draft_len) == [by_hand(text, draft_len) for text in texts]
