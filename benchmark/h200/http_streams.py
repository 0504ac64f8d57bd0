"""Streams of ``POST /generate``, all begun at once, by a client that does next to nothing while they run.

Bytes are kept as they arrive, with their time; they are taken apart when the last stream has ended.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final
from urllib.parse import urlsplit

from benchmark.spec_toggle.client import GenerationError, StreamTrace, parse_trace

_OK: Final = b"HTTP/1.1 200"
_END: Final = b"0\r\n\r\n"  # of a chunked body; JSON has no such line ends
_DONE: Final = b"[DONE]"
_MOST_BYTES: Final = 1 << 18  # of one read

Pieces = list[tuple[float, bytes]]


@dataclass(frozen=True, slots=True)
class Wave:
    traces: list[StreamTrace]
    before: Any  # what ``look`` gave when every stream had its first token
    after: Any  # and when the first stream had ended


async def run_wave(
    base_url: str, prompts: Sequence[Sequence[int]], sampling: dict[str, Any], look: Callable[[], Any]
) -> Wave:
    """``look`` is an async function without arguments, awaited while the streams go on.

    Raises:
        GenerationError: a request was refused, or its stream broke off.
    """
    bodies = [
        json.dumps({"input_ids": list(ids), "sampling_params": sampling, "stream": True}).encode()
        for ids in prompts
    ]
    streams = await asyncio.gather(*(_Stream.open(base_url) for _ in bodies))
    gc.disable()  # a collection would stop every stream's clock
    try:
        began = time.perf_counter()
        running = [
            asyncio.create_task(stream.generate(body)) for stream, body in zip(streams, bodies, strict=True)
        ]
        looking = asyncio.create_task(_look_twice(streams, running, look))
        received = await asyncio.gather(*running)
        before, after = await looking
    finally:
        gc.enable()
        for stream in streams:
            stream.close()
    return Wave([parse_trace(began, list(events_of(pieces))) for pieces in received], before, after)


async def _look_twice(
    streams: Sequence[_Stream], running: Sequence[asyncio.Task[Pieces]], look: Callable[[], Any]
) -> tuple[Any, Any]:
    waiting = asyncio.create_task(_all_begun(streams))
    # A stream may fail before all have begun: then there is nothing to wait for.
    await asyncio.wait((waiting, *running), return_when=asyncio.FIRST_COMPLETED)
    before = await look()
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return before, await look()


async def _all_begun(streams: Sequence[_Stream]) -> Pieces:
    for stream in streams:
        await stream.has_begun.wait()
    return []


class _Stream:
    """One connection, which is there before the request is sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str) -> None:
        self.has_begun = asyncio.Event()
        self._reader, self._writer, self._host = reader, writer, host

    @staticmethod
    async def open(base_url: str) -> _Stream:
        where = urlsplit(base_url)
        reader, writer = await asyncio.open_connection(where.hostname, where.port, limit=_MOST_BYTES)
        return _Stream(reader, writer, where.netloc)

    def close(self) -> None:
        self._writer.close()

    async def generate(self, body: bytes) -> Pieces:
        self._writer.write(
            f"POST /generate HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n".encode()
            + body
        )
        pieces: Pieces = []
        head = tail = b""
        while tail != _END:
            data = await self._reader.read(_MOST_BYTES)
            pieces.append((time.perf_counter(), data))
            if not data:
                raise GenerationError("the server closed the connection in the middle of a stream")
            if len(head) < len(_OK):
                head += data
                self._check_head(head)
            tail = (tail + data[-len(_END) :])[-len(_END) :]
        return pieces

    def _check_head(self, head: bytes) -> None:
        if not head.startswith(_OK[: len(head)]):
            raise GenerationError(f"/generate answered {head[:600].decode('utf-8', 'replace')}")
        if len(head) >= len(_OK):
            self.has_begun.set()


def events_of(pieces: Pieces) -> Iterator[tuple[float, bytes]]:
    """(arrival of its last byte, JSON bytes) of every event of a chunked response."""
    whole = b"".join(data for _, data in pieces)
    ends = list(accumulate(len(data) for _, data in pieces))
    at, rest = whole.index(b"\r\n\r\n") + 4, b""
    while True:
        line_end = whole.index(b"\r\n", at)
        size, begin = int(whole[at:line_end], 16), line_end + 2
        if size == 0:
            return
        at = begin + size + 2
        arrived = pieces[bisect_left(ends, begin + size)][0]
        *events, rest = (rest + whole[begin : begin + size]).split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data and data != _DONE:
                yield arrived, data
