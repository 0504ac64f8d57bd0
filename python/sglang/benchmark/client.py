"""Requests to a server, many at a time, in one process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import aiohttp

from sglang.benchmark.outcome import Outcome
from sglang.benchmark.stream_readers import Reader, StreamError, error_text
from sglang.srt.utils.open_files import allow_many_files

_DONE: Final = b"[DONE]"
_CONNECT_S: Final = 60.0
_READ_BUFFER: Final = 2**20
FAULTS: Final = (aiohttp.ClientError, asyncio.TimeoutError, StreamError, ValueError, OSError)


def open_session(base_url: str, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """A session without a limit on connections, nor on how long an answer takes."""
    allow_many_files()
    return aiohttp.ClientSession(
        base_url=f"{base_url}/",
        headers=dict(headers),
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        read_bufsize=_READ_BUFFER,
    )


def auth_headers() -> dict[str, str]:
    """From OPENAI_API_KEY, as SGLang's client does; none where it is not set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


async def send(session: aiohttp.ClientSession, path: str, body: dict[str, Any], reader: Reader) -> Outcome:
    """One request to its end. A fault becomes an outcome with an error."""
    started = reader.started
    try:
        async with session.post(path.lstrip("/"), json=body) as response:
            if response.status != 200:
                return Outcome(started, error=f"HTTP {response.status}: {error_text(await response.read())}")
            if body["stream"]:
                async for now, data in _events(response):
                    reader.feed(now, data)
            else:
                data = await response.read()
                reader.whole(time.perf_counter(), data)
        return reader.outcome(time.perf_counter())
    except FAULTS as error:
        return Outcome(started, error=str(error) or type(error).__name__)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """Moment and JSON of every server-sent event."""
    rest = b""
    async for chunk in response.content.iter_any():
        now = time.perf_counter()
        whole = rest + chunk if rest else chunk
        if b"\r" in whole:
            whole = whole.replace(b"\r\n", b"\n")
        *events, rest = whole.split(b"\n\n")
        for event in events:
            data = event.removeprefix(b"data:").strip()
            if data and data != _DONE and not data.startswith(b":"):
                yield now, data
