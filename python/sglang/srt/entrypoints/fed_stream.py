"""Streams of which each look gives all events that have come, encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Protocol

from starlette.types import Message, Send

from sglang.srt.entrypoints.answering import DONE, ErrorShape, StreamedResponse, encoded_event, stream_error
from sglang.srt.entrypoints.pushes import Held, Pushes, begin
from sglang.srt.managers.text_request import Group, RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager


class Feed(Protocol):
    has_ended: bool  # there are no further events

    def look(self) -> Iterator[bytes]:
        """The events that have come since the last look.

        Raises:
            RequestError: the request has failed.
        """
        ...


class FedStream(StreamedResponse):
    """Its task begins and ends it; in between the server's line of streams pushes it."""

    def __init__(self, feed: Feed, manager: TokenizerManager, group: Group, shape: ErrorShape) -> None:
        super().__init__(manager, group, shape)
        self.changed = group.changed
        self._feed = feed
        self._error: RequestError | None = None

    @property
    def is_over(self) -> bool:
        return self._feed.has_ended or self._error is not None

    def news(self) -> bytes:
        """All events that have come since the last call."""
        self.changed.clear()
        made = []
        try:
            for event in self._feed.look():
                made.append(event)
        except RequestError as error:
            self._error = error
        return b"".join(made)

    async def _send_all(self, start: Send, send: Send, pushes: Pushes | None) -> RequestError | None:
        while not self.is_over:
            data = self.news()
            if data:
                if not self._started:
                    await self._begin(start)
                await send(part_of_body(data))
            if self.is_over or self.changed.is_set:
                continue
            if pushes is None or not self._started:
                await self.changed.wait()
            else:
                await _Push(self, pushes, send).run()
        if not self._started:
            if self._error is not None:
                return self._error
            await self._begin(start)
        last = b"" if self._error is None else encoded_event(stream_error(self._error))
        await send({"type": "http.response.body", "body": last + DONE, "more_body": False})
        return None


class _Push:
    """A stream while it is pushed: until it is over, or its socket is full."""

    def __init__(self, stream: FedStream, pushes: Pushes, send: Send) -> None:
        self._stream = stream
        self._pushes = pushes
        self._send: Any = send
        self._data = b""
        self._held: Held | None = None
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        changed = self._stream.changed
        changed.listener = self._ring
        try:
            await self._done
            changed.listener = None
            if self._held is not None:
                await self._held
        finally:
            changed.listener = None
            if self._held is not None:
                self._held.close()

    def _ring(self) -> None:
        self._pushes.add(self)

    def take(self) -> None:
        if self._done.done():  # its task looks itself, or its client has gone
            return
        try:
            self._data = self._stream.news()
        except Exception as error:
            self._done.set_exception(error)

    def write(self) -> None:
        if self._done.done():
            return
        try:
            if self._data:
                self._held = begin(self._send(part_of_body(self._data)))
                self._data = b""
        except Exception as error:
            self._done.set_exception(error)
            return
        if self._held is not None or self._stream.is_over:
            self._done.set_result(None)


def part_of_body(data: bytes) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": True}
