"""A client that follows many streams with little work: no HTTP library, no JSON, one look at each event."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from stamps import StampReader

_TEXT_OF: Final = {
    "/v1/chat/completions": b'"content":"',
    "/v1/completions": b'"text":"',
    "/generate": b'"text":"',
}
_END: Final = b"\n\n"
_READ_BYTES: Final = 1 << 18
_DONE: Final = b"data: [DONE]"
_REASON: Final = b'"finish_reason":'
_ERROR: Final = b'data: {"error"'


@dataclass(slots=True)
class Seen:
    """What all streams of a client got, since ``clear``."""

    chunks: int = 0
    tokens: int = 0
    bytes: int = 0
    ages_s: list[float] = field(default_factory=list)  # of each chunk's newest token
    # For what is read next: one for all, and no new one of 256 KiB for every read.
    buffer: memoryview = field(default_factory=lambda: memoryview(bytearray(_READ_BYTES)))

    def clear(self) -> None:
        self.chunks = self.tokens = self.bytes = 0
        self.ages_s = []


class Stream(asyncio.BufferedProtocol):
    """One connection with one streamed answer. ``ended`` has how it ended: "done", "error" or "lost"."""

    def __init__(self, path: str, body: dict[str, Any], reader: StampReader, seen: Seen) -> None:
        data = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._request = f"{head}content-length: {len(data)}\r\n\r\n".encode() + data
        self._mark = _TEXT_OF[path]
        self._is_cumulative = path == "/generate"
        self._reader = reader
        self._seen = seen
        self._rest = b""
        self.tokens = 0
        self._shown = 0  # bytes of the answer's text, where events repeat it
        self._first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.num_ends = 0  # events that say how it ended: one is right
        self.transport: asyncio.Transport | None = None

    async def first_token(self) -> None:
        waited: tuple[asyncio.Future[Any], ...] = (self._first, self.ended)
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._seen.buffer

    def buffer_updated(self, nbytes: int) -> None:
        now = time.monotonic()
        data = self._rest + self._seen.buffer[:nbytes]
        self._seen.bytes += nbytes
        *events, self._rest = data.split(_END)
        for event in events:
            self._read(event, now)

    def _read(self, event: bytes, now: float) -> None:
        start = event.find(self._mark)
        if start >= 0:
            start += len(self._mark)
            text = event[start + self._shown : event.find(b'"', start + self._shown)]
            if text:
                self._count(text, now)
        if event.endswith(_DONE):
            self._end("done")
        elif _ERROR in event:
            self.num_ends += 1
            self._end("error")
        elif event.find(_REASON + b"null") < 0 and _REASON in event:
            self.num_ends += 1

    def _count(self, text: bytes, now: float) -> None:
        if self._is_cumulative:
            self._shown += len(text)
        seen = self._seen
        seen.chunks += 1
        tokens = text.count(b" ")
        self.tokens += tokens
        seen.tokens += tokens
        seen.ages_s.append(self._reader.age_s(text[text.rfind(b" ") + 1 :], now))
        if not self._first.done():
            self._first.set_result(None)

    def _end(self, how: str) -> None:
        if not self.ended.done():
            self.ended.set_result(how)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end("lost")


async def open_stream(host: str, port: int, make: Callable[[], Stream]) -> Stream:
    _, stream = await asyncio.get_running_loop().create_connection(make, host, port)
    return stream
