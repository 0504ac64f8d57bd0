"""What a stream of /generate repeats is encoded once and reads the same. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from sglang.srt.entrypoints.native_answer import NativeAnswers
from sglang.srt.managers.io_struct import FinishReason, RequestStats, TextOutput
from sglang.srt.managers.text_request import Group, Sample, TextRequest
from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class Call:
    answers_with_list: bool
    return_prompt_token_ids: bool = False


PIECES = st.lists(
    st.tuples(st.integers(0, 1), st.text(max_size=5), st.lists(st.integers(0, 200_000), max_size=4)),
    max_size=12,
)


async def answers(pieces: list[tuple[int, str, list[int]]], incremental: bool, wire: bool) -> list[Any]:
    group = Group()
    for i in range(2):
        sample = Sample(f"r{i}", TextRequest("x", SamplingParams(), stream=True), [1], group.changed)
        sample.created_ts = 0.0
        group.samples.append(sample)
    made = NativeAnswers(Call(answers_with_list=True), "v", incremental)  # type: ignore[arg-type]
    stream = made.events(group) if wire else made.stream(group)
    got = []

    async def read() -> None:
        async for event in stream:
            got.append(msgspec.json.decode(msgspec.json.encode(event)))

    reading = asyncio.create_task(read())
    for i, text, ids in pieces:
        group.samples[i].update(TextOutput(f"r{i}", text, ids, RequestStats(1, len(ids), 0)), 1.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    for sample in group.samples:
        sample.update(TextOutput(sample.rid, "", [], sample.stats, FinishReason("length", length=1)), 2.0)
    await reading
    return got


@given(PIECES, st.booleans())
def test_events_read_as_the_answers_of_an_engine(
    pieces: list[tuple[int, str, list[int]]], incremental: bool
) -> None:
    on_the_wire = asyncio.run(answers(pieces, incremental, wire=True))
    assert on_the_wire == asyncio.run(answers(pieces, incremental, wire=False))
    texts = [""] * 2
    for i, text, _ in pieces:
        texts[i] += text
    if not incremental:
        for i in (0, 1):
            assert [event["text"] for event in on_the_wire if event["index"] == i][-1] == texts[i]
