"""Streams of server-sent events, many at once, by a client that does little while they run.

Only the arrival time and the raw bytes of each piece are kept; they are parsed when a stream has ended. The
library is aiohttp: httpx takes several times as long for an event, which 250 streams would feel.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Final

import aiohttp

from benchmark.spec_toggle.client import GenerationError, StreamTrace
from benchmark.spec_toggle.prompts import Prompt
from benchmark.spec_toggle.protocols import NATIVE, Protocol, Wish

Piece = tuple[float, bytes]
"""Arrival (time.perf_counter()) and bytes."""

_DONE: Final = b"[DONE]"


def open_streams(
    base_url: str, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None
) -> aiohttp.ClientSession:
    """Return a session without a limit on connections; ``timeout_s`` bounds each wait for the server.

    To be called inside a running event loop.
    """
    return aiohttp.ClientSession(
        base_url,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10.0, sock_read=timeout_s),
        headers=headers,
    )


async def stream_events(
    session: aiohttp.ClientSession, body: dict[str, Any], path: str = NATIVE.path
) -> AsyncGenerator[Piece]:
    """Yield (arrival time, JSON bytes) for every server-sent event of one request, as they come.

    Raises:
        GenerationError: the server refused the request, or the connection failed.
    """
    rest = b""
    async with aclosing(_pieces(session, path, body)) as pieces:
        async for moment, data in pieces:
            events, rest = _split(rest + data)
            for event in events:
                yield moment, event


async def generate(
    session: aiohttp.ClientSession, prompt: Prompt, wish: Wish, protocol: Protocol = NATIVE, model: str = ""
) -> StreamTrace:
    """Run one streaming request to its end and return its trace.

    Raises:
        GenerationError: the server refused the request, or its stream went wrong.
    """
    body = protocol.body(prompt, wish, model)
    started = time.perf_counter()
    async with aclosing(_pieces(session, protocol.path, body)) as pieces:
        received = [piece async for piece in pieces]
    return protocol.parse(started, list(events_of(received)))


async def generate_together(
    session: aiohttp.ClientSession,
    prompts: Sequence[Prompt],
    wish: Wish,
    protocol: Protocol = NATIVE,
    model: str = "",
) -> list[StreamTrace]:
    """Start one stream for each prompt at the same moment, and wait for all of them.

    If one fails, the others are broken off: the server aborts a request whose client has gone.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(generate(session, prompt, wish, protocol, model)) for prompt in prompts
            ]
    except* GenerationError as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def events_of(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Yield (arrival of its last byte, JSON bytes) for every event in a response's pieces."""
    rest = b""
    for moment, data in pieces:
        events, rest = _split(rest + data)
        for event in events:
            yield moment, event


async def _pieces(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> AsyncGenerator[Piece]:
    try:
        async with session.post(path, json={**body, "stream": True}) as response:
            if response.status != 200:
                detail = (await response.read()).decode("utf-8", "replace")
                raise GenerationError(f"{path} answered {response.status}: {detail[:300]}")
            async for data in response.content.iter_any():
                yield time.perf_counter(), data
    except (aiohttp.ClientError, TimeoutError) as error:
        raise GenerationError(f"{path}: {type(error).__name__}: {error}") from error


def _split(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the JSON of the whole events in ``data``, and what is left."""
    *events, rest = data.replace(b"\r\n", b"\n").split(b"\n\n")
    found = []
    for event in events:
        # Other lines (event:, id:, comments) carry nothing here.
        lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
        payload = b"\n".join(lines)
        if payload and payload != _DONE:
            found.append(payload)
    return found, rest


def _first(errors: BaseExceptionGroup[Any]) -> GenerationError:
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, GenerationError)
    return error
