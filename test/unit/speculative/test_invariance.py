"""Toggle invariance: no mode, and no pattern of modes, changes a token. float64, no exemptions."""

from __future__ import annotations

import random
from functools import cache

import pytest
from helpers.plan_driver import GREEDY, DrivenRequest, PlanDriver
from helpers.tiny_executor import tiny_executor

from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import SlotSampling

SHAPES = [(1, 1, 2), (3, 1, 4), (5, 1, 6), (2, 4, 16), (5, 4, 8), (1, 4, 5), (5, 4, 3)]
PROMPTS = [[5, 9, 200, 31], [7], list(range(40, 62)), [250, 3, 3, 3, 17, 90, 4]]
NUM_TOKENS = 40
SAMPLINGS = [
    GREEDY,
    SlotSampling(temperature=1.0, seed=1),
    SlotSampling(temperature=0.6, seed=2, top_p=0.9),
    SlotSampling(temperature=1.3, seed=3, top_k=30, min_p=0.02),
    SlotSampling(temperature=0.0, frequency_penalty=0.7, repetition_penalty=1.2),
    SlotSampling(temperature=0.8, seed=4, presence_penalty=0.9, logit_bias=((8, 3.0), (9, -4.0))),
    SlotSampling(temperature=0.3, seed=5, draft_cap=1),
    SlotSampling(temperature=0.0, draft_cap=0, min_new_tokens=20, suppressed_ids=tuple(range(128))),
]


@cache
def _driver(shape: tuple[int, int, int], page_size: int, draft_vocab: int | None) -> PlanDriver:
    executor: InProcessExecutor = tiny_executor(shape, page_size=page_size, draft_vocab=draft_vocab)
    return PlanDriver(executor)


@cache
def _plain(prompt: int, sampling: int) -> list[int]:
    """Each request alone, in a server without a drafter."""
    driver = _driver_without()
    request = driver.add(PROMPTS[prompt], SAMPLINGS[sampling])
    output = driver.generate([request], NUM_TOKENS)[0]
    driver.release(request)
    return output


@cache
def _driver_without() -> PlanDriver:
    return PlanDriver(tiny_executor())


def _add_all(driver: PlanDriver, rng: random.Random) -> list[tuple[DrivenRequest, int, int]]:
    cases = [(rng.randrange(len(PROMPTS)), i) for i in range(len(SAMPLINGS))]
    rng.shuffle(cases)
    return [(driver.add(PROMPTS[p], SAMPLINGS[s], chunk=rng.choice([0, 1, 3])), p, s) for p, s in cases]


def _check(driver: PlanDriver, mode: str, seed: int) -> list[DrivenRequest]:
    """All samplings in one batch; rows leave it as they finish."""
    rng = random.Random(seed)
    assert driver.info.spec is not None
    most = driver.info.spec.num_steps
    added = _add_all(driver, rng)
    step = 0

    def draft_len() -> int:
        nonlocal step
        step += 1
        if mode == "always":
            return most
        return most * (step % 2) if mode == "alternate" else rng.randrange(most + 1)

    outputs = driver.generate([request for request, _, _ in added], NUM_TOKENS, draft_len)
    for (request, prompt, sampling), output in zip(added, outputs, strict=True):
        assert output == _plain(prompt, sampling), (mode, seed, SAMPLINGS[sampling])
        cap = request.sampling.draft_cap
        assert cap is None or max(request.counts) <= cap + 1
        assert not request.faulty
        driver.release(request)
    return [request for request, _, _ in added]


@pytest.mark.parametrize("mode", ["always", "alternate", "random"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_are_those_of_plain_decoding(shape: tuple[int, int, int], mode: str) -> None:
    driver = _driver(shape, page_size=4 if shape[0] == 3 else 1, draft_vocab=None)
    requests = _check(driver, mode, seed=SHAPES.index(shape) * 10 + len(mode))
    taken = [count for request in requests for count in request.counts]
    assert max(taken) > 1, "no draft was ever accepted: this says nothing"


@pytest.mark.parametrize("shape", [(3, 1, 4), (3, 3, 9)], ids=str)
def test_with_a_reduced_draft_vocabulary(shape: tuple[int, int, int]) -> None:
    _check(_driver(shape, page_size=16, draft_vocab=100), "random", seed=3)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_other_families(family: str) -> None:
    driver = PlanDriver(tiny_executor((3, 1, 4), family=family))
    for sampling in (GREEDY, SlotSampling(temperature=1.0, seed=1, frequency_penalty=0.5)):
        plain, speculative = driver.add(PROMPTS[2], sampling), driver.add(PROMPTS[2], sampling)
        expected = driver.generate([plain], NUM_TOKENS)
        assert driver.generate([speculative], NUM_TOKENS, 3) == expected


def test_shared_noise_keeps_drafts_at_a_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter draws with the noise of the target: its plain argmax would be right less often."""
    driver = _driver((3, 1, 4), page_size=4, draft_vocab=None)

    def mean_length() -> float:
        requests = [driver.add(PROMPTS[0], SlotSampling(temperature=1.0, seed=seed)) for seed in range(8)]
        driver.generate(requests, 60, 3)
        for request in requests:
            driver.release(request)
        return sum(sum(r.counts) for r in requests) / sum(len(r.counts) for r in requests)

    coupled = mean_length()
    states = driver.executor.worker.sampler.states
    monkeypatch.setattr(states, "draft_scores", lambda logits, *_: logits)
    assert coupled > mean_length() + 0.05
