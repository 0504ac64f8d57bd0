"""Clients of the load test: those that read to the end, that vanish, that read slowly, that abort."""

import asyncio
import random
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp
from stamps import StampReader
from stream_client import Seen, Stream, open_stream

PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/generate")
KINDS: Final = {"reads": 0.7, "vanishes": 0.1, "slow": 0.1, "aborts": 0.1}
_PAUSE_S: Final = (0.5, 2.0)  # of a slow reader
_ANSWER_S: Final = 120.0  # for the whole of an answer


@dataclass(slots=True)
class Tally:
    ended: Counter[str] = field(default_factory=Counter)  # kind and end -> requests
    wrong: list[str] = field(default_factory=list)


class Clients:
    """Each of them asks again and again until ``stop``."""

    def __init__(self, port: int, reader: StampReader, session: aiohttp.ClientSession, seed: int) -> None:
        self.fast, self.slow = Seen(), Seen()
        self.tally = Tally()
        self._port = port
        self._reader = reader
        self._session = session
        self._random = random.Random(seed)
        self._stopping = False

    def stop(self) -> None:
        """No further requests; those that run go on to their ends."""
        self._stopping = True

    async def run(self) -> None:
        """One client."""
        while not self._stopping:
            kind = self._random.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                async with asyncio.timeout(_ANSWER_S):
                    end = await self._ask(kind)
            except TimeoutError:
                end = f"no end after {_ANSWER_S:.0f} s"
                self.tally.wrong.append(f"a client that {kind} got {end}")
            except (OSError, aiohttp.ClientError) as error:
                end = f"no connection: {error}"
                self.tally.wrong.append(f"a client that {kind} got {end}")
            self.tally.ended[f"{kind}: {end}"] += 1

    async def _ask(self, kind: str) -> str:
        path, rid = self._random.choice(PATHS), uuid.uuid4().hex
        tokens = self._random.randrange(20, 150)
        seen = self.slow if kind == "slow" else self.fast
        body = _body(path, rid, f"{rid} asks", tokens)
        stream = await open_stream("127.0.0.1", self._port, lambda: Stream(path, body, self._reader, seen))
        assert stream.transport is not None
        try:
            if kind == "vanishes":
                await asyncio.wait({stream.ended}, timeout=self._random.uniform(0, 5))
                return "vanished"
            if kind == "aborts":
                await asyncio.wait({stream.ended}, timeout=self._random.uniform(0, 5))
                await self._abort(rid)
            if kind == "slow":
                await self._read_slowly(stream)
            end = await stream.ended
            self._check(kind, stream, end, tokens)
            return end
        finally:
            stream.transport.abort()

    async def _abort(self, rid: str) -> None:
        url = f"http://127.0.0.1:{self._port}/abort_request"
        async with self._session.post(url, json={"rid": rid}) as response:
            if response.status != 200:
                self.tally.wrong.append(f"/abort_request answered {response.status}")

    async def _read_slowly(self, stream: Stream) -> None:
        assert stream.transport is not None
        while not stream.ended.done():
            stream.transport.pause_reading()
            await asyncio.sleep(self._random.uniform(*_PAUSE_S))
            if stream.transport.is_closing():
                return
            stream.transport.resume_reading()
            await asyncio.wait({stream.ended}, timeout=0.2)

    def _check(self, kind: str, stream: Stream, end: str, tokens: int) -> None:
        if end != "done":
            self.tally.wrong.append(f"a client that {kind} got: {end}")
        elif stream.num_ends != 1:
            self.tally.wrong.append(f"a client that {kind} was told {stream.num_ends} times that it ended")
        elif kind != "aborts" and stream.tokens != tokens:
            self.tally.wrong.append(f"a client that {kind} got {stream.tokens} of {tokens} tokens")


def _body(path: str, rid: str, text: str, tokens: int) -> dict[str, Any]:
    if path == "/generate":
        return {"text": text, "rid": rid, "sampling_params": {"max_new_tokens": tokens, "ignore_eos": True}}
    body: dict[str, Any] = {"rid": rid, "max_tokens": tokens, "ignore_eos": True}
    if path == "/v1/completions":
        return {**body, "prompt": text}
    return {**body, "messages": [{"role": "user", "content": text}]}
