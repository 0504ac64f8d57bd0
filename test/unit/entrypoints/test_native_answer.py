"""What a stream of /generate repeats is encoded once and reads the same. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.native_answer import NativeAnswers, NativeFeed
from sglang.srt.managers.io_struct import FinishReason, RequestStats, RequestWish, TextOutput, TokenReport
from sglang.srt.managers.text_reports import TextReport
from sglang.srt.managers.text_request import Group, Sample, TextRequest
from sglang.srt.model_executor.step_plan import Logprobs
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class Call:
    answers_with_list: bool
    return_prompt_token_ids: bool = False


PIECES = st.lists(
    st.tuples(st.integers(0, 1), st.text(max_size=5), st.lists(st.integers(0, 200_000), max_size=4)),
    max_size=12,
)


async def events_of(made: NativeAnswers, group: Group, way: str) -> AsyncIterator[Any]:
    """As clients read them; ``way``: by which method of ``made``."""
    if way != "feed":
        async for answer in made.stream(group) if way == "stream" else made.events(group):
            yield msgspec.json.decode(msgspec.json.encode(answer))
        return
    feed = NativeFeed(made, group)
    while not feed.has_ended:
        await group.changed.wait()
        group.changed.clear()
        for event in feed.look():
            yield msgspec.json.decode(event.removeprefix(b"data: "))


async def answers(pieces: list[tuple[int, str, list[int]]], incremental: bool, way: str) -> list[Any]:
    group = Group()
    for i in range(2):
        sample = Sample(f"r{i}", TextRequest("x", SamplingParams(), stream=True), [1], group.changed)
        sample.created_ts = 0.0
        group.samples.append(sample)
    made = NativeAnswers(Call(answers_with_list=True), "v", incremental)  # type: ignore[arg-type]
    got = []

    async def read() -> None:
        async for event in events_of(made, group, way):
            got.append(event)

    reading = asyncio.create_task(read())
    for i, text, ids in pieces:
        group.samples[i].update(TextOutput(f"r{i}", text, ids, RequestStats(1, len(ids), 0)), 1.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    for sample in group.samples:
        sample.update(TextOutput(sample.rid, "", [], sample.stats, FinishReason("length", length=1)), 2.0)
    await reading
    return got


@given(st.lists(st.integers(0, 3), max_size=6), st.booleans(), st.sampled_from(["feed", "events"]))
def test_logprobs_come_with_their_ids(counts: list[int], incremental: bool, way: str) -> None:
    """Joined, what increments tell is what the end of a cumulative stream tells."""
    wish = RequestWish(logprobs=True, logprob_start=1, num_top=1, token_ids=(7,))

    async def run() -> list[Any]:
        group = Group()
        told = TextReport(wish, [4, 5, 6], lambda token: None)
        request = TextRequest("x", SamplingParams(), stream=True, wish=wish)
        group.samples.append(Sample("r", request, [4, 5, 6], group.changed, told))
        made = NativeAnswers(Call(answers_with_list=False), "v", incremental)  # type: ignore[arg-type]
        got: list[Any] = []

        async def read() -> None:
            async for event in events_of(made, group, way):
                got.append(event)

        reading = asyncio.create_task(read())
        at = 0
        for number, count in enumerate([*counts, 1]):
            ids = list(range(at, at + count))
            of_ids = Logprobs(
                tuple(-float(i) for i in ids), ((-0.5,),) * count, ((9,),) * count, ((-8.0,),) * count
            )
            prompt = Logprobs((-1.0,), ((-0.5,),), ((9,),), ((-8.0,),)) if number == 0 else Logprobs()
            finish = FinishReason("length", length=1) if number == len(counts) else None
            report = TokenReport(prompt, of_ids)
            group.samples[0].update(TextOutput("r", "", ids, RequestStats(3, at, 0), finish, report), 1.0)
            at += count
            for _ in range(3):
                await asyncio.sleep(0)
        await reading
        return got

    events = asyncio.run(run())
    total, own, top, named = sum(counts) + 1, [], [], []
    for event in events:
        meta = event["meta_info"]
        assert meta["input_token_logprobs"] == [[None, 5, None], [-1.0, 6, None]]
        assert meta["input_top_logprobs"] == [None, [[-0.5, 9, None]]]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == event["output_ids"]
        own = (own if incremental else []) + meta["output_token_logprobs"]
        top = (top if incremental else []) + meta["output_top_logprobs"]
        named = (named if incremental else []) + meta["output_token_ids_logprobs"]
        assert meta["output_token_logprobs_length"] == len(own)
    assert own == [[-float(i), i, None] for i in range(total)]
    assert top == [[[-0.5, 9, None]]] * total and named == [[[-8.0, 7, None]]] * total


@settings(max_examples=40, deadline=None)
@given(PIECES, st.booleans())
def test_events_read_as_the_answers_of_an_engine(
    pieces: list[tuple[int, str, list[int]]], incremental: bool
) -> None:
    on_the_wire = asyncio.run(answers(pieces, incremental, "feed"))
    for way in ("events", "stream"):
        assert on_the_wire == asyncio.run(answers(pieces, incremental, way))
    texts = [""] * 2
    for i, text, _ in pieces:
        texts[i] += text
    if not incremental:
        for i in (0, 1):
            assert [event["text"] for event in on_the_wire if event["index"] == i][-1] == texts[i]
