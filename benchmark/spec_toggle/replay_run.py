"""Replay a trace of arrivals against a server, watching the mode of its steps."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import httpx

from benchmark.spec_toggle import client
from benchmark.spec_toggle.client import GenerationError, StreamTrace
from benchmark.spec_toggle.columns import Column, Target, apply_change
from benchmark.spec_toggle.prompts import Prompt
from benchmark.spec_toggle.protocols import Wish
from benchmark.spec_toggle.servers import ServerError
from benchmark.spec_toggle.streams import generate, open_streams
from benchmark.traces import Arrival


@dataclass(frozen=True, slots=True)
class ServerState:
    """What the server said about its decode steps at one moment."""

    second: float  # since the replay began
    plain_steps: int  # decode steps so far
    spec_steps: int
    switches: int  # changes of mode so far
    decisions: dict[str, int]  # "drafts:reason" -> steps so far; {} where they aren't counted


@dataclass(frozen=True, slots=True)
class Replay:
    """One replay: times of its traces are seconds since it began."""

    traces: tuple[StreamTrace, ...]
    states: tuple[ServerState, ...]  # () of a server that doesn't tell
    errors: tuple[str, ...]  # of requests that failed
    late_s: float  # the worst delay between an arrival's time and the sending of its request


@dataclass(frozen=True, slots=True)
class ReplayWork:
    """What every replay does."""

    trace: tuple[Arrival, ...]
    prompts: tuple[Prompt, ...]
    wish: Wish  # of every request, but for its number of tokens
    poll_s: float  # between two questions for the server's state
    timeout_s: float  # of a whole replay

    def prompt_of(self, arrival: Arrival) -> Prompt:
        """Return an arrival's prompt: its own text, or one of the data set's."""
        if arrival.prompt is not None:
            return Prompt(f"trace-{arrival.index}", arrival.domain, arrival.prompt)
        fitting = [p for p in self.prompts if p.domain == arrival.domain] or self.prompts
        return fitting[arrival.index % len(fitting)]


async def replay(column: Column, work: ReplayWork) -> Replay:
    """Run the whole trace in one column's mode, with an empty prefix cache, and wait for all answers.

    Raises:
        GenerationError: every request failed.
        TimeoutError: it took longer than it may.
    """
    target = column.target
    await apply_change(column)
    async with (
        open_streams(target.base_url, headers=target.headers) as session,
        client.open_client(target.base_url, headers=target.headers) as http,
    ):
        first = work.prompt_of(work.trace[0])
        await generate(session, first, replace(work.wish, tokens=8), target.protocol, target.model)
        await _flush(http)
        states: list[ServerState] = []
        begun = time.perf_counter()
        watching = asyncio.create_task(_watch(http, target, begun, work.poll_s, states))
        try:
            running = [_request(session, target, work, arrival, begun) for arrival in work.trace]
            results = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), work.timeout_s)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        states += await _state(http, target, begun)
    return _replay(results, states, work.trace, begun)


def _replay(
    results: Sequence[StreamTrace | BaseException],
    states: Sequence[ServerState],
    trace: Sequence[Arrival],
    begun: float,
) -> Replay:
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, GenerationError):
            raise result
    done = [(arrival, r) for arrival, r in zip(trace, results, strict=True) if isinstance(r, StreamTrace)]
    errors = tuple(str(result) for result in results if isinstance(result, BaseException))
    if not done:
        raise GenerationError(f"every request failed; the first: {errors[0]}")
    return Replay(
        traces=tuple(_since(result, begun) for _, result in done),
        states=tuple(states),
        errors=errors,
        late_s=max(result.started - begun - arrival.second for arrival, result in done),
    )


async def _request(
    session: aiohttp.ClientSession, target: Target, work: ReplayWork, arrival: Arrival, begun: float
) -> StreamTrace:
    await asyncio.sleep(max(0.0, begun + arrival.second - time.perf_counter()))
    wish = replace(work.wish, tokens=arrival.output_len)
    return await generate(session, work.prompt_of(arrival), wish, target.protocol, target.model)


async def _watch(
    http: httpx.AsyncClient, target: Target, begun: float, poll_s: float, states: list[ServerState]
) -> None:
    while True:
        states += await _state(http, target, begun)
        await asyncio.sleep(poll_s)


async def _state(http: httpx.AsyncClient, target: Target, begun: float) -> list[ServerState]:
    """Return what the server says now; nothing where it doesn't tell."""
    if not target.is_ours:
        return []
    try:
        state: dict[str, Any] = await client.internal_state(http)
    except httpx.HTTPError as error:
        raise ServerError(f"{target.name} does not answer /server_info: {error}") from error
    steps = state.get("decode_steps") or {}
    return [
        ServerState(
            second=time.perf_counter() - begun,
            plain_steps=int(steps.get("plain", 0)),
            spec_steps=int(steps.get("spec", 0)),
            switches=int(state.get("spec_switches") or 0),
            decisions=dict(state.get("spec_decisions") or {}),
        )
    ]


async def _flush(http: httpx.AsyncClient) -> None:
    """Empty the prefix cache, where the server has a way to: each replay is to find it as the others did."""
    with suppress(httpx.HTTPError):
        await http.post("/flush_cache")


def _since(trace: StreamTrace, begun: float) -> StreamTrace:
    return replace(trace, started=trace.started - begun, times=tuple(t - begun for t in trace.times))
