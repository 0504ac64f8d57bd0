"""What is pushed is what a task would send, whatever the socket does. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.entrypoints.answering import encoded_event, openai_error
from sglang.srt.entrypoints.body_sends import BodySends
from sglang.srt.entrypoints.event_frame import EventFrame
from sglang.srt.entrypoints.fed_stream import FedStream
from sglang.srt.entrypoints.pushes import Pushes
from sglang.srt.managers.io_struct import FinishReason, RequestStats, TextOutput
from sglang.srt.managers.text_request import Group, RequestError, Sample, TextRequest
from sglang.srt.sampling.sampling_params import SamplingParams

FAILED = FinishReason("abort", message="broke", status_code=500)
ENDED = FinishReason("stop", matched=7)


class Manager:
    def __init__(self) -> None:
        self.aborted: list[str] = []

    def abort_group(self, group: Group, reason: str) -> None:
        self.aborted.append(reason)


class TextFeed:
    def __init__(self, group: Group) -> None:
        self.has_ended = False
        self._group = group

    def look(self) -> Iterator[bytes]:
        self.has_ended = self._group.is_finished
        for _, sample, delta in self._group.news():
            if sample.has_failed:
                raise RequestError("broke", 500)
            yield delta.text.encode()


class Client:
    """A socket that is full now and then, and a connection that the client closes when it is told to."""

    def __init__(self, full: Sequence[bool]) -> None:
        self.status = 0
        self.bodies: list[bytes] = []
        self.has_ended = False
        self.num_waiting = 0
        self.room = asyncio.Event()
        self.gone = asyncio.Event()
        self._full = list(full)

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if self._full and self._full.pop():
            self.room.clear()
            self.num_waiting += 1
            try:
                await self.room.wait()
            finally:
                self.num_waiting -= 1
        self.bodies.append(message["body"])
        self.has_ended = not message.get("more_body", False)


async def turns(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Server:
    def __init__(self, pushed: bool) -> None:
        self.manager = Manager()
        self.groups: list[Group] = []
        self.app = BodySends(self._app) if pushed else self._app
        self.clients: list[Client] = []
        self.tasks: list[asyncio.Task[None]] = []

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        group = self.groups[scope["number"]]
        await FedStream(TextFeed(group), self.manager, group, openai_error)(scope, receive, send)  # type: ignore[arg-type]

    def open(self, full: Sequence[bool] = ()) -> None:
        group = Group()
        sample = Sample("r", TextRequest("x", SamplingParams(), stream=True), [1], group.changed)
        group.samples.append(sample)
        client = Client(full)
        scope = {"type": "http", "number": len(self.groups)}
        self.groups.append(group)
        self.clients.append(client)
        self.tasks.append(asyncio.create_task(self.app(scope, client.receive, client.send)))  # type: ignore[arg-type]

    def say(self, number: int, text: str, finish: FinishReason | None = None) -> None:
        output = TextOutput("r", text, [1] if text else [], RequestStats(1, 1, 0), finish)
        self.groups[number].samples[0].update(output, 1.0)


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=30
)  # who says something; whether the loop goes on then; whether full sockets get room


async def conversation(pushed: bool, steps: Any, full: Sequence[bool], finish: FinishReason) -> list[Client]:
    server = Server(pushed)
    for _ in range(3):
        server.open(full)
    await turns()
    for word, (number, goes_on, gets_room) in enumerate(steps):
        server.say(number, f"<{word}>")
        if goes_on:
            await turns()
        if gets_room:
            for client in server.clients:
                client.room.set()
    for number in range(3):
        server.say(number, "", finish)
    while not all(task.done() for task in server.tasks):
        for client in server.clients:
            client.room.set()
        await turns()
    await asyncio.gather(*server.tasks)
    return server.clients


@settings(max_examples=100, deadline=None)
@given(STEPS, st.lists(st.booleans(), max_size=8), st.sampled_from([ENDED, FAILED]))
def test_pushed_or_not_a_client_gets_all_in_order(steps: Any, full: list[bool], finish: FinishReason) -> None:
    for pushed in (True, False):
        clients = asyncio.run(conversation(pushed, steps, full, finish))
        for number, client in enumerate(clients):
            said = "".join(f"<{word}>" for word, step in enumerate(steps) if step[0] == number)
            body = b"".join(client.bodies).decode()
            text, _, rest = body.partition("data: ")
            if finish is FAILED and not body.startswith("<"):
                assert client.status == 500  # nothing had come: an ordinary answer
                continue
            assert client.status == 200 and client.has_ended and rest.endswith("[DONE]\n\n")
            assert said.startswith(text) if finish is FAILED else text == said
            assert ("broke" in rest) == (finish is FAILED)


def test_what_comes_while_a_socket_is_full_is_joined_and_others_go_on() -> None:
    async def run() -> None:
        server = Server(pushed=True)
        server.open(full=[False, True])  # popped from the end: the first body waits
        server.open()
        await turns()
        for word in "abcd":
            server.say(0, word)
            server.say(1, word)
            await turns()
        assert server.clients[0].bodies == [] and server.clients[0].num_waiting == 1
        assert server.clients[1].bodies == [b"a", b"b", b"c", b"d"]
        server.clients[0].room.set()
        await turns()
        assert server.clients[0].bodies == [b"a", b"bcd"]
        server.say(0, "e")
        await turns()
        assert server.clients[0].bodies[2:] == [b"e"]
        for task in server.tasks:
            task.cancel()

    asyncio.run(run())


def test_a_client_that_goes_while_its_pushed_socket_is_full_ends_its_request() -> None:
    async def run() -> None:
        server = Server(pushed=True)
        server.open(full=[True, False])  # the second body, which is pushed, waits
        await turns()
        server.say(0, "a")
        await turns()
        server.say(0, "b")
        await turns()
        assert server.clients[0].bodies == [b"a"] and server.clients[0].num_waiting == 1
        server.clients[0].gone.set()
        await turns()
        assert server.tasks[0].done() and server.clients[0].num_waiting == 0
        assert server.manager.aborted == ["the client went away"]
        server.say(0, "c")  # nobody is there to hear it
        await turns()
        assert server.clients[0].bodies == [b"a"]

    asyncio.run(run())


def test_a_failing_look_ends_the_stream_and_no_other() -> None:
    async def run() -> None:
        server = Server(pushed=True)
        server.open()
        server.open()
        await turns()
        for number in (0, 1):
            server.say(number, "a")
        await turns()
        server.groups[0].news = lambda: 1 / 0  # type: ignore[assignment,return-value]
        for number in (0, 1):
            server.say(number, "b")
        await turns()
        assert server.clients[1].bodies == [b"a", b"b"]
        with pytest.raises(ZeroDivisionError):
            await server.tasks[0]
        server.tasks[1].cancel()

    asyncio.run(run())


class Noted:
    def __init__(self, name: int, said: list[tuple[str, int]]) -> None:
        self._name = name
        self._said = said

    def take(self) -> None:
        self._said.append(("take", self._name))

    def write(self) -> None:
        self._said.append(("write", self._name))


@given(st.integers(0, 200))
def test_a_turn_of_the_line_takes_before_it_writes_and_leaves_the_rest_to_the_next(count: int) -> None:
    async def run() -> None:
        said: list[tuple[str, int]] = []
        pushes = Pushes()
        for name in range(count):
            pushes.add(Noted(name, said))
        await asyncio.sleep(0)
        first = min(count, 64)
        assert said == [(what, name) for what in ("take", "write") for name in range(first)]
        await turns(4)
        assert [name for what, name in said if what == "write"] == list(range(count))

    asyncio.run(run())


@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_a_frame_makes_the_event(text: str, other: str) -> None:
    def event(content: str) -> dict[str, Any]:
        return {"id": other, "choices": [{"delta": {"content": content}, "end": None}], "model": other}

    assert EventFrame(event).event(text) == encoded_event(event(text))
