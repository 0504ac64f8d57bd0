"""What requests are told beside their text is what they are told alone, in plain decode: in every mode and
across switches, with chunks, prefix hits, retractions, stops inside accepted runs and streams.

Run alone: ``pytest THIS_FILE -s`` (prints the counts).
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, replace

import pytest
from helpers.scheduler_harness import Answer, decode
from helpers.tiny_executor import tiny_executor
from helpers.toggle_schedule import EOS_IDS, VOCAB, Arrival, Schedule, ScheduleRun, make_schedule

from sglang.srt.managers.io_struct import GenerateRequest, RequestWish, TokenBatch, TokenReport
from sglang.srt.managers.metrics import NullSink
from sglang.srt.managers.reports import joined
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.prefix_cache import NoCache
from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import Logprobs
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.toggle import decide_by_threshold

SHAPES = ((3, 1, 4), (2, 4, 16))
SCHEDULES = 4  # of each shape
LONG_SCHEDULES = 400


@dataclass(frozen=True, slots=True)
class Told:
    prompt: Logprobs
    chosen: Logprobs
    hidden: list[list[float]]


def told(reports: list[TokenReport]) -> Told:
    hidden: list[list[float]] = []
    for report in reports:
        for vectors in report.hidden:
            values = array(vectors.kind, vectors.data).tolist()
            hidden += [values[at : at + vectors.size] for at in range(0, len(values), vectors.size)]
    return Told(joined([r.prompt for r in reports]), joined([r.chosen for r in reports]), hidden)


def random_wish(rng: random.Random, prompt_len: int) -> RequestWish:
    return RequestWish(
        logprobs=rng.random() < 0.8,
        logprob_start=rng.choice((-1, 0, rng.randint(0, prompt_len))),
        num_top=rng.choice((0, 0, 1, 4)),
        token_ids=tuple(rng.randrange(VOCAB) for _ in range(rng.choice((0, 2, 3)))) or None,
        hidden_states=rng.choice(("", "all", "last")),
    )


def with_wishes(schedule: Schedule) -> Schedule:
    """Of most of its requests."""
    rng = random.Random(schedule.seed + 1)

    def wishing(arrival: Arrival) -> Arrival:
        wish = random_wish(rng, len(arrival.message.input_ids)) if rng.random() < 0.8 else None
        message = GenerateRequest(
            *(getattr(arrival.message, name) for name in GenerateRequest.__struct_fields__[:-1]), wish
        )
        return replace(arrival, message=message)

    return replace(schedule, arrivals=tuple(map(wishing, schedule.arrivals)))


def alone(executor: InProcessExecutor, message: GenerateRequest) -> Answer:
    """Plain decode of one request, without a cache."""
    answer = Answer()

    def collect(batch: TokenBatch) -> None:
        for output in batch.outputs:
            answer.ids += output.new_ids
            answer.reports += [] if output.report is None else [output.report]

    scheduler = Scheduler(
        executor, SchedulerConfig(max_running_requests=1), decide_by_threshold, NoCache(), decode, EOS_IDS,
        collect, lambda reply: None, NullSink(), lambda: 0.0,
    )  # fmt: skip
    scheduler.receive(message)
    scheduler.drain()
    return answer


def check(message: GenerateRequest, answer: Answer, lone: Answer) -> None:
    wish, mine, theirs = message.wish, told(answer.reports), told(lone.reports)
    assert wish is not None and answer.finish is not None
    if answer.finish.type != "abort":
        assert answer.ids == lone.ids
        start = wish.logprob_start if wish.logprob_start >= 0 else len(message.input_ids)
        scored = max(0, len(message.input_ids) - 1 - start) if wish.logprobs else 0
        assert len(mine.prompt.own) == scored
        assert len(mine.chosen.own) == (len(answer.ids) if wish.logprobs else 0)
        places = len(message.input_ids) + len(answer.ids) - 1
        streamed = wish.hidden_states == "last" and message.stream
        if not streamed:
            assert len(mine.hidden) == {"all": places, "last": 1, "": 0}[wish.hidden_states]
    near(mine.prompt, theirs.prompt, wish)
    near(mine.chosen, theirs.chosen, wish)
    if wish.hidden_states == "last":
        mine.hidden[:-1], theirs.hidden[:-1] = [], []
        if answer.finish.type == "abort":
            return
    for vector, other in zip(mine.hidden, theirs.hidden, strict=False):
        assert vector == pytest.approx(other, abs=1e-9)


def near(mine: Logprobs, theirs: Logprobs, wish: RequestWish) -> None:
    """An aborted request has the beginning of what it would have had."""
    count = len(mine.own)
    assert count <= len(theirs.own)
    assert mine.own == pytest.approx(theirs.own[:count], abs=1e-9)
    assert len(mine.top) == len(mine.top_ids) == (count if wish.num_top else 0)
    assert len(mine.named) == (count if wish.token_ids else 0)
    for mine_top, ids, their_top, their_ids in zip(
        mine.top, mine.top_ids, theirs.top, theirs.top_ids, strict=False
    ):
        assert len(mine_top) == wish.num_top
        assert mine_top == pytest.approx(their_top, abs=1e-9)
        assert ids == their_ids
    for named, other in zip(mine.named, theirs.named, strict=False):
        assert named == pytest.approx(other, abs=1e-9)


def run_schedules(shape: tuple[int, int, int], page_size: int, seeds: range) -> None:
    sizes = {"page_size": page_size, "max_total_tokens": 2048, "max_running_requests": 6}
    executor = tiny_executor(shape, **sizes)
    plain = tiny_executor(None, max_total_tokens=512, max_running_requests=1)
    checked = retractions = cached = 0
    try:
        for seed in seeds:
            schedule = with_wishes(make_schedule(seed, page_size, executor.info.num_pages))
            outcome = ScheduleRun(executor, schedule).run()
            retractions += outcome.retractions
            cached += outcome.cached_tokens
            for arrival in schedule.arrivals:
                message, answer = arrival.message, outcome.answers[arrival.message.rid]
                if message.wish is None:
                    assert answer.reports == []
                    continue
                try:
                    check(message, answer, alone(plain, message))
                except AssertionError as error:
                    raise AssertionError(f"schedule {seed}, {message.rid}: {error}") from error
                checked += 1
    finally:
        executor.shutdown()
        plain.shutdown()
    print(f"\n{shape}: {checked} requests, {retractions} retractions, {cached} cached tokens")
    assert checked and retractions and cached


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_told_does_not_depend_on_modes(shape: tuple[int, int, int]) -> None:
    run_schedules(shape, 4, range(SCHEDULES))


@pytest.mark.parametrize(
    "wish, cached",
    [
        (RequestWish(True, 0), 0),
        (RequestWish(True, 13), 12),
        (RequestWish(True), 20),
        (RequestWish(hidden_states="last"), 20),
        (RequestWish(hidden_states="all"), 0),
    ],
    ids=str,
)
def test_what_must_be_told_is_not_taken_from_the_cache(wish: RequestWish, cached: int) -> None:
    """21 tokens in pages of 4, known from an earlier request."""
    prompt, sampling = list(range(40, 61)), SamplingParams(max_new_tokens=4, temperature=0.0, ignore_eos=True)
    first = GenerateRequest("first", prompt, sampling, False, 0.0)
    second = GenerateRequest("second", prompt, sampling, False, 0.0, wish=wish)
    executor = tiny_executor((3, 1, 4), page_size=4)
    config = SchedulerConfig(max_running_requests=1, chunked_prefill_size=8)
    schedule = Schedule(
        0,
        (Arrival(0, first, None), Arrival(9, second, None)),
        config,
        64,
        use_cache=True,
        changes=(),
        mode_seed=0,
    )
    answer = ScheduleRun(executor, schedule).run().answers["second"]
    assert answer.stats is not None and answer.stats.cached_tokens == cached
    check(second, answer, alone(executor, second))
    executor.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.timeout(0)
def test_many_schedules(shape: tuple[int, int, int]) -> None:
    run_schedules(shape, 1, range(1000, 1000 + LONG_SCHEDULES))
