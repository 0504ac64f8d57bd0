"""Keep a given number of streams running against a server, and count what they receive."""

import asyncio
import json
import time
from collections import deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from itertools import count
from typing import Any

import aiohttp

from benchmark.spec_toggle.client import GenerationError
from benchmark.spec_toggle.prompts import Prompt
from benchmark.spec_toggle.streams import stream_events


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came with one event of one stream."""

    moment: float  # time.perf_counter()
    tokens: int
    is_step: bool  # not a request's first event, which is the prefill's


class TokenCounter:
    """Arrivals of the last few seconds, over all streams."""

    def __init__(self, window_s: float, step_window_s: float) -> None:
        self._window_s = window_s
        self._step_window_s = step_window_s
        self._arrivals: deque[Arrival] = deque()

    def add(self, arrival: Arrival) -> None:
        """Count an arrival."""
        self._arrivals.append(arrival)

    def rate(self, now: float) -> float:
        """Return tokens per second over the window."""
        self._forget(now)
        return sum(arrival.tokens for arrival in self._arrivals) / self._window_s

    def tokens_per_step(self, now: float) -> float | None:
        """Return the mean tokens a step gave one stream, over the shorter window; None without steps."""
        begin = now - self._step_window_s
        steps = [arrival.tokens for arrival in self._arrivals if arrival.is_step and arrival.moment >= begin]
        return sum(steps) / len(steps) if steps else None

    def _forget(self, now: float) -> None:
        while self._arrivals and self._arrivals[0].moment < now - self._window_s:
            self._arrivals.popleft()


class StreamPool:
    """A changing number of streams; each starts a new request when its last one has ended."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        prompts: Sequence[Prompt],
        sampling_params: dict[str, Any],
        counter: TokenCounter,
    ) -> None:
        self._session = session
        self._prompts = prompts
        self._sampling_params = sampling_params
        self._counter = counter
        self._next_prompt = count()
        self._streams: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._streams)

    async def resize(self, wanted: int) -> None:
        """Start streams, or break off the newest ones: the server aborts a request whose client has gone."""
        self.check()
        while len(self._streams) < wanted:
            self._streams.append(asyncio.create_task(self._stream()))
        await self._break_off(wanted)

    async def close(self) -> None:
        """Break off all streams, whatever state they are in."""
        await self._break_off(0)

    async def _break_off(self, remaining: int) -> None:
        leaving, self._streams = self._streams[remaining:], self._streams[:remaining]
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)

    def check(self) -> None:
        """Raise the error of a stream that failed, if one did."""
        for task in self._streams:
            if task.done():
                task.result()

    async def _stream(self) -> None:
        while True:
            prompt = self._prompts[next(self._next_prompt) % len(self._prompts)]
            await self._request(prompt.text)

    async def _request(self, text: str) -> None:
        body = {"text": text, "sampling_params": self._sampling_params}
        received = 0
        async with aclosing(stream_events(self._session, body)) as events:
            async for _, data in events:
                event = json.loads(data)
                if "error" in event:
                    raise GenerationError(str(event["error"]))
                total = int(event["meta_info"]["completion_tokens"])
                if total > received:
                    self._counter.add(Arrival(time.perf_counter(), total - received, received > 0))
                received = total
