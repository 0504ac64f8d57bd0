"""Requests on the text side: checks, samples and seeds, answers, failure. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.tiny_tokenizer import write_byte_tokenizer

from sglang.srt.managers import tokenizer_manager
from sglang.srt.managers.io_struct import (
    AbortRequest,
    ControlReply,
    FinishReason,
    FlushCacheRequest,
    GenerateRequest,
    RequestStats,
    RequestWish,
    SetStateRequest,
    TextBatch,
    TextOutput,
    encode,
)
from sglang.srt.managers.text_observers import Observers
from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.managers.tokenizer_manager import Limits, TokenizerManager, sample_seed
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.text_tokenizer import TextTokenizer

LIMITS = Limits(context_len=32, max_total_num_tokens=1000, vocab_size=256)


class Desk:
    """A manager whose scheduler is a list."""

    def __init__(self, folder: Path, limits: Limits = LIMITS, seed: int | None = None) -> None:
        self.sent: list[Any] = []
        tokenizer = TextTokenizer.from_folder(write_byte_tokenizer(folder))
        self.manager = TokenizerManager(tokenizer, limits, self.sent.append, Observers(), seed)

    def answer(self, rid: str, text: str, finish: FinishReason | None = None) -> None:
        ids = list(text.encode())
        stats = RequestStats(prompt_tokens=1, completion_tokens=len(ids), cached_tokens=0)
        self.manager.receive(TextBatch([TextOutput(rid, text, ids, stats, finish)]))


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 10))


def request(prompt: str | list[int] = "hi", rid: str | None = None, **sampling: Any) -> TextRequest:
    return TextRequest(prompt, SamplingParams(**{"max_new_tokens": 4, **sampling}), rid)


def test_what_the_scheduler_gets(desk: Desk) -> None:
    run(desk.manager.submit([request("hi", rid="a", sampling_seed=5)]))
    (sent,) = desk.sent
    assert isinstance(sent, GenerateRequest)
    assert (sent.rid, sent.input_ids, sent.stream) == ("a", [104, 105], False)
    assert (sent.sampling.n, sent.sampling.sampling_seed) == (1, 5)


def test_samples_have_names_and_seeds(desk: Desk) -> None:
    group = run(desk.manager.submit([request("a", "r", n=3, sampling_seed=5), request("b", n=2)]))
    assert [s.rid for s in group.samples[:3]] == ["r_0", "r_1", "r_2"]
    seeds = [sent.sampling.sampling_seed for sent in desk.sent]
    assert seeds[:3] == [sample_seed(5, i) for i in range(3)]
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_server_seed_makes_unseeded_requests_repeatable(tmp_path: Path) -> None:
    seeds = []
    for name in ("a", "b"):
        desk = Desk(tmp_path / name, seed=3)
        run(desk.manager.submit([request(), request()]))
        seeds.append([sent.sampling.sampling_seed for sent in desk.sent])
    assert seeds[0] == seeds[1] and seeds[0][0] != seeds[0][1]


@pytest.mark.parametrize(
    "bad, words",
    [
        (request(""), "empty"),
        (request([]), "empty"),
        (request([256]), "256"),
        (request([-1]), "-1"),
        (request("x" * 32), "32 tokens.*32 tokens"),
        (request("x" * 30), "context length is 32 tokens.*30 input tokens.*are 34.*at most 2"),
        (request("\ud800"), "surrogate"),
        (request(rid="\ud800"), "rid.*surrogate"),
    ],
)
def test_requests_that_can_not_be(desk: Desk, bad: TextRequest, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        run(desk.manager.submit([request(), bad]))
    assert caught.value.status_code == 400
    assert desk.sent == [] and desk.manager.num_running == 0  # all or none


def test_a_prompt_that_the_cache_can_not_hold(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Limits(context_len=32, max_total_num_tokens=8, vocab_size=256))
    with pytest.raises(RequestError, match="KV cache"):
        run(desk.manager.submit([request("x" * 9)]))


def test_no_limit_means_up_to_the_context(desk: Desk) -> None:
    run(desk.manager.submit([request("abc", max_new_tokens=None)]))
    assert desk.sent[0].sampling.max_new_tokens == 29


def test_long_texts_are_tokenised_too(tmp_path: Path) -> None:
    desk = Desk(tmp_path, Limits(context_len=100000, max_total_num_tokens=100000, vocab_size=256))
    run(desk.manager.submit([request("é" * 5000)]))
    assert len(desk.sent[0].input_ids) == 10000


def test_megabytes_are_refused_without_tokenising_them(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk.manager.tokenizer, "encode", lambda *_: pytest.fail("tokenised"))
    with pytest.raises(RequestError, match="32 tokens.*at least 5000000 tokens"):
        run(desk.manager.submit([request("x" * 5_000_000)]))


def test_rids_are_used_once_at_a_time(desk: Desk) -> None:
    async def scenario() -> None:
        await desk.manager.submit([request(rid="same")])
        for wrong in ([request(rid="same")], [request(rid="two"), request(rid="two")]):
            with pytest.raises(RequestError, match="in use"):
                await desk.manager.submit(wrong)
        desk.answer("same", "x", FinishReason("length", length=1))
        await desk.manager.submit([request(rid="same")])

    run(scenario())


def test_updates_come_in_order_and_end(desk: Desk) -> None:
    async def scenario() -> list[Any]:
        group = await desk.manager.submit([request(rid="a"), request(rid="b")])
        desk.answer("b", "one ")
        desk.answer("b", "two ")
        got = []
        async for index, _, delta in group.updates():
            got.append((index, delta.text))
            if len(got) == 1:
                desk.answer("a", "", FinishReason("abort", message="gone"))
            if len(got) == 2:
                desk.answer("b", "three", FinishReason("stop", matched=2))
        return [got, group.samples[1].text]

    assert run(scenario()) == [[(1, "one two "), (0, ""), (1, "three")], "one two three"]


def test_one_failed_member_ends_the_waiting(desk: Desk) -> None:
    async def scenario() -> Any:
        group = await desk.manager.submit([request(rid="a"), request(rid="b")])
        desk.answer("b", "", FinishReason("abort", message="full", status_code=503))
        samples = await group.finished()
        desk.manager.abort_group(group, "why")
        return [sample.has_failed for sample in samples]

    assert run(scenario()) == [False, True]
    assert desk.sent[2:] == [AbortRequest("a", reason="why")]


def test_abort_finds_a_request_and_its_samples(desk: Desk) -> None:
    run(desk.manager.submit([request(rid="r", n=2), request(rid="other")]))
    desk.sent.clear()
    desk.manager.abort("r", "why")
    desk.manager.abort("r_1", "why")
    desk.manager.abort("nobody", "why")
    assert [message.rid for message in desk.sent] == ["r_0", "r_1", "r_1"]


def test_abort_finds_the_prompts_of_a_call(desk: Desk) -> None:
    calls = [
        replace(request(rid=rid, n=n), call_rid=rid[:4])
        for rid, n in (("call-0", 1), ("call-1", 2), ("calm-0", 1))
    ]
    run(desk.manager.submit(calls))
    desk.sent.clear()
    desk.manager.abort("call", "why")
    assert [message.rid for message in desk.sent] == ["call-0", "call-1_0", "call-1_1"]


def test_control_messages_get_their_own_answers(desk: Desk) -> None:
    async def scenario() -> list[ControlReply]:
        asked = [
            asyncio.ensure_future(desk.manager.flush_cache()),
            asyncio.ensure_future(desk.manager.set_state({"x": 1})),
        ]
        await asyncio.sleep(0)
        flush, change = desk.sent
        assert isinstance(flush, FlushCacheRequest) and isinstance(change, SetStateRequest)
        desk.manager.receive(ControlReply(change.request_id, ok=False, error="no"))
        desk.manager.receive(ControlReply(flush.request_id, ok=True))
        desk.manager.receive(ControlReply("nobody asked", ok=True))
        return list(await asyncio.gather(*asked))

    flushed, changed = run(scenario())
    assert flushed.ok and changed.error == "no"


@pytest.mark.parametrize("value", [2**64, "\ud800", object(), [10**30]])
def test_a_state_that_no_message_can_hold_is_the_clients_fault(tmp_path: Path, value: object) -> None:
    tokenizer = TextTokenizer.from_folder(write_byte_tokenizer(tmp_path))
    manager = TokenizerManager(tokenizer, LIMITS, lambda m: [encode(m)].clear(), Observers(), None)
    with pytest.raises(RequestError, match="can't be sent") as caught:
        run(manager.set_state({"x": value}))
    assert caught.value.status_code == 400


def test_failure_answers_everything_and_refuses_the_rest(desk: Desk) -> None:
    async def scenario() -> None:
        group = await desk.manager.submit([request()])
        asked = asyncio.ensure_future(desk.manager.flush_cache())
        state = asyncio.ensure_future(desk.manager.get_state())
        await asyncio.sleep(0)
        desk.manager.fail("the scheduler is dead")
        (sample,) = await group.finished()
        assert sample.finish is not None and sample.finish.status_code == 500
        assert not (await asked).ok
        with pytest.raises(RequestError, match="dead"):
            await state
        with pytest.raises(RequestError, match="dead") as caught:
            await desk.manager.submit([request()])
        assert caught.value.status_code == 503
        desk.answer(sample.rid, "late")  # what was on its way is dropped

    run(scenario())


@pytest.mark.parametrize(("start", "most"), [(0, 2), (2, 3), (-1, 9)])
def test_a_prompt_is_not_told_more_ids_than_fit(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, start: int, most: int
) -> None:
    monkeypatch.setattr(tokenizer_manager, "MOST_PROMPT_LOGPROBS", 12)

    def asked(num_top: int) -> TextRequest:
        return replace(request([5] * 6), wish=RequestWish(True, start, num_top - 1, (7,)))

    run(desk.manager.submit([asked(most)]))
    if start >= 0:
        with pytest.raises(RequestError, match="ask for fewer ids"):
            run(desk.manager.submit([asked(most + 1)]))
    assert len(desk.sent) == 1
