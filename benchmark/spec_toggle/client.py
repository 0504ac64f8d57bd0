"""A streaming client of ``POST /generate`` that records when every token arrived.

While a stream runs, only the arrival time and the raw bytes of each event are kept; they are parsed when
it has ended. The client shares the processor with the server it measures, so it does as little as it can.
"""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

import httpx

_DONE: Final = b"[DONE]"


class GenerationError(RuntimeError):
    """The server answered a request with an error, or ended its stream early."""


@dataclass(frozen=True, slots=True)
class StreamTrace:
    """One finished request: when its tokens arrived, and what the server said about it."""

    started: float  # time.perf_counter() when the request was sent
    times: tuple[float, ...]  # [events] arrival of each event that brought tokens, same clock
    counts: tuple[int, ...]  # [events] tokens received up to and including that event
    output_ids: tuple[int, ...]
    meta: dict[str, Any]  # meta_info of the last event


def open_client(base_url: str, timeout_s: float = 600.0) -> httpx.AsyncClient:
    """Return a client without a limit on connections; ``timeout_s`` bounds each wait for the server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    return httpx.AsyncClient(base_url=base_url, timeout=httpx.Timeout(timeout_s, connect=10.0), limits=limits)


async def stream_events(
    client: httpx.AsyncClient, body: dict[str, Any]
) -> AsyncGenerator[tuple[float, bytes]]:
    """Yield (arrival time, JSON bytes) for every server-sent event of one request.

    Raises:
        GenerationError: the server refused the request.
    """
    async with client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        if response.status_code != 200:
            detail = (await response.aread()).decode("utf-8", "replace")
            raise GenerationError(f"/generate answered {response.status_code}: {detail[:300]}")
        rest = b""
        async for chunk in response.aiter_raw():
            now = time.perf_counter()
            *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                data = event.removeprefix(b"data:").strip()
                if data and data != _DONE:
                    yield now, data


async def generate(client: httpx.AsyncClient, text: str, sampling_params: dict[str, Any]) -> StreamTrace:
    """Run one streaming request to its end and return its trace."""
    started = time.perf_counter()
    body = {"text": text, "sampling_params": sampling_params}
    async with aclosing(stream_events(client, body)) as events:
        received = [event async for event in events]
    return parse_trace(started, received)


async def generate_together(
    client: httpx.AsyncClient, texts: Sequence[str], sampling_params: dict[str, Any]
) -> list[StreamTrace]:
    """Start one stream for each text at the same moment, and wait for all of them."""
    return list(await asyncio.gather(*(generate(client, text, sampling_params) for text in texts)))


def parse_trace(started: float, received: Sequence[tuple[float, bytes]]) -> StreamTrace:
    """Turn the raw events of one request into its trace.

    Raises:
        GenerationError: an event carries an error, or the stream ended before the request did.
    """
    times: list[float] = []
    counts: list[int] = []
    last: dict[str, Any] = {}
    for arrived, data in received:
        last = json.loads(data)
        if "error" in last:
            raise GenerationError(f"the stream ended with an error: {last['error']}")
        count = int(last["meta_info"]["completion_tokens"])
        if not counts or count > counts[-1]:
            times.append(arrived)
            counts.append(count)
    meta = last.get("meta_info", {})
    _require_finished(meta)
    return StreamTrace(started, tuple(times), tuple(counts), tuple(last.get("output_ids") or ()), meta)


def _require_finished(meta: dict[str, Any]) -> None:
    reason = meta.get("finish_reason")
    if not reason:
        raise GenerationError("the stream ended before the request was finished")
    if reason.get("type") == "abort":
        raise GenerationError(f"the server aborted a request: {reason.get('message')}")


async def server_info(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return ``GET /server_info``."""
    response = await client.get("/server_info")
    response.raise_for_status()
    info: dict[str, Any] = response.json()
    return info


async def internal_state(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return ``internal_states[0]`` of ``GET /server_info``."""
    state: dict[str, Any] = (await server_info(client))["internal_states"][0]
    return state


async def metric(client: httpx.AsyncClient, name: str) -> float | None:
    """Return the sum over labels of a gauge or counter of ``GET /metrics``; None where there is none."""
    response = await client.get("/metrics")
    if response.status_code != 200:
        return None
    lines = [line for line in response.text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines) if lines else None


async def set_internal_state(client: httpx.AsyncClient, changes: dict[str, Any]) -> None:
    """Change ``server_args`` of the running server."""
    response = await client.post("/set_internal_state", json={"server_args": changes})
    response.raise_for_status()
