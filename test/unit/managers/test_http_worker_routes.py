"""Several processes that answer clients: ids lead back to who asked, and an abort to who has the request.

Run alone: pytest THIS_FILE
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from helpers.scheduler_harness import SchedulerHarness
from helpers.tiny_tokenizer import write_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.detokenizer_manager import send_texts
from sglang.srt.managers.io_struct import (
    AbortRequest,
    ControlReply,
    FinishReason,
    GenerateRequest,
    RequestStats,
    TextBatch,
    TextOutput,
    ToPeer,
    encode,
    rid_in_use,
    tokenizer_decoder,
)
from sglang.srt.managers.text_observers import Observers
from sglang.srt.managers.text_request import TextRequest
from sglang.srt.managers.tokenizer_manager import Limits, Peers, TokenizerManager
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.routed_ids import prefix_of, worker_of
from sglang.srt.utils.text_tokenizer import TextTokenizer

STATS = RequestStats(1, 1, 0)
END = FinishReason("length", length=1)


@settings(max_examples=40)
@given(st.integers(0, 1000), st.text())
def test_an_id_names_who_asked(worker: int, own: str) -> None:
    assert worker_of(prefix_of(worker) + own) == worker


class Outboxes:
    """A ``RoutedSender`` without sockets."""

    has_workers = True

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []

    def send(self, worker: int, message: Any) -> None:
        self.sent.append((worker, message))


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3)), max_size=20))
def test_a_batch_is_dealt_out_once_and_in_order(outputs: list[tuple[int, str]]) -> None:
    batch = TextBatch([TextOutput(prefix_of(w) + t, t, [1], STATS) for w, t in outputs])
    boxes = Outboxes()
    send_texts(batch, boxes)  # type: ignore[arg-type]
    assert len(boxes.sent) == len({worker for worker, _ in outputs})
    for worker, part in boxes.sent:
        assert [one.new_text for one in part.outputs] == [t for w, t in outputs if w == worker]


class Linked(Peers):
    """Messages as they would arrive, in the order of sending."""

    def __init__(self, index: int, hall: Hall) -> None:
        self.prefix = prefix_of(index)
        self._index = index
        self._hall = hall

    def tell(self, message: ToPeer) -> None:
        decoded: Any = tokenizer_decoder.decode(encode(message))
        for index, manager in self._hall.managers.items():
            if index != self._index:
                manager.hear(decoded)


class Hall:
    """Two managers with one scheduler, which is a list."""

    def __init__(self, folder: Path) -> None:
        self.sent: list[Any] = []
        self.managers: dict[int, TokenizerManager] = {}
        tokenizer = TextTokenizer.from_folder(write_byte_tokenizer(folder))
        for index in (1, 2):
            self.managers[index] = TokenizerManager(
                tokenizer, Limits(32, 1000, 256), self._take, Observers(), 0, Linked(index, self)
            )

    def _take(self, message: Any) -> None:
        self.sent.append(message)
        if not isinstance(message, GenerateRequest | AbortRequest):
            asker = self.managers[worker_of(message.request_id)]
            reply = ControlReply(message.request_id, ok=True)
            asyncio.get_running_loop().call_soon(asker.receive, reply)

    def aborted(self) -> list[str]:
        return [message.rid for message in self.sent if isinstance(message, AbortRequest)]


@pytest.fixture
def hall(tmp_path: Path) -> Hall:
    return Hall(tmp_path)


def request(rid: str) -> TextRequest:
    return TextRequest("hi", SamplingParams(max_new_tokens=4), rid)


def test_an_abort_reaches_whoever_has_the_request(hall: Hall) -> None:
    async def run() -> None:
        mine = await hall.managers[1].submit([request("a")])
        await hall.managers[2].submit([request("b")])
        hall.managers[2].abort("a", "because")
        assert hall.aborted() == ["1:a"]
        hall.managers[1].receive(TextBatch([TextOutput("1:a", "x", [120], STATS, END)]))
        assert (mine.samples[0].rid, mine.samples[0].text) == ("a", "x") and mine.is_finished
        hall.managers[1].abort("a", "again")
        assert hall.aborted() == ["1:a"]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_the_answer_to_a_name_goes_to_who_asked(hall: Hall) -> None:
    async def run() -> None:
        groups = {i: await manager.submit([request("same")]) for i, manager in hall.managers.items()}
        hall.managers[2].receive(TextBatch([TextOutput("2:same", "two", [116], STATS, END)]))
        assert [groups[i].is_finished for i in (1, 2)] == [False, True]
        hall.managers[1].abort("same", "whoever has it")
        assert hall.aborted() == ["1:same"]

    asyncio.run(asyncio.wait_for(run(), 10))


def test_a_name_is_in_use_in_all_workers() -> None:
    """Each of them knows its own requests; the scheduler knows them all."""
    harness = SchedulerHarness(has_workers=True)
    first = harness.send([1, 2], rid=prefix_of(1) + "same:name", max_new_tokens=9)
    other = harness.send([1, 2], rid=prefix_of(2) + "another", max_new_tokens=3)
    second = harness.send([1, 2], rid=prefix_of(2) + "same:name", max_new_tokens=3)
    refused = harness.answers.pop(second).finish
    assert refused is not None and (refused.type, refused.status_code) == ("abort", 400)
    assert refused.message == rid_in_use("same:name")
    del harness.sent[second]
    harness.abort(second)  # it has ended, and the first goes on
    harness.run()
    harness.check_end()
    assert [len(harness.answers[rid].ids) for rid in (first, other)] == [9, 3]
    again = harness.send([1, 2], rid=prefix_of(3) + "same:name", max_new_tokens=3)
    harness.abort(again)
    harness.send([1, 2], rid=prefix_of(4) + "same:name", max_new_tokens=3)
    harness.run()
    harness.check_end()


def test_a_pause_holds_the_requests_of_all(hall: Hall) -> None:
    async def run() -> None:
        one, two = hall.managers.values()
        await one.pause("in_place")
        assert one.is_paused and two.is_paused
        waiting = asyncio.create_task(two.submit([request("a")]))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await two.resume()
        await waiting
        assert not one.is_paused

    asyncio.run(asyncio.wait_for(run(), 10))
