"""A server that streams made-up tokens at a fixed pace, through SGLang's own API and OpenAI's.

It generates nothing: what is measured with it is the client.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


@dataclass(frozen=True, slots=True)
class Pace:
    """How the server answers."""

    gap_s: float = 0.01  # between a stream's events
    tokens_per_event: int = 1
    incremental: bool = False  # native events hold only what is new
    usage: bool = True  # OpenAI chunks count tokens, where they are asked to
    fail_every: int = 0  # each so many-th request is refused
    break_every: int = 0  # each so many-th stream ends with an error in its middle


@dataclass(slots=True)
class Seen:
    """What the server was asked."""

    requests: int = 0
    running: int = 0
    most_running: int = 0
    flushes: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)


class FakeServer:
    """The handlers of one server."""

    def __init__(self, pace: Pace, keep_bodies: bool = False) -> None:
        self.pace = pace
        self.seen = Seen()
        self._keep_bodies = keep_bodies

    def app(self) -> web.Application:
        """Return the application to be served."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._nothing)
        app.router.add_get("/health", self._health)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_post("/flush_cache", self._flush)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "fake"}]})

    async def _nothing(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        state = {"avg_spec_accept_length": float(self.pace.tokens_per_event), "last_gen_throughput": 123.0}
        return web.json_response({"internal_states": [state], "version": "fake"})

    async def _flush(self, _: web.Request) -> web.Response:
        self.seen.flushes += 1
        return web.Response(text="Cache flushed.")

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self._begin(request)
        sampling, rows = body["sampling_params"], _native_rows(body)
        events = _native_events(len(rows), sampling["max_new_tokens"], self.pace, "index" if rows[1:] else "")
        return await self._answer(request, body, events)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self._begin(request)
        return await self._answer(request, body, _openai_events(body, body["max_tokens"], self.pace, False))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await self._begin(request)
        wanted = body["max_completion_tokens"]
        return await self._answer(request, body, _openai_events(body, wanted, self.pace, True))

    async def _begin(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.seen.requests += 1
        if self._keep_bodies:
            self.seen.bodies.append(body)
        if self.pace.fail_every and self.seen.requests % self.pace.fail_every == 0:
            raise web.HTTPBadRequest(
                text=json.dumps({"error": {"message": "refused on purpose"}}), content_type="application/json"
            )
        return body

    async def _answer(
        self, request: web.Request, body: dict[str, Any], events: Iterator[dict[str, Any]]
    ) -> web.StreamResponse:
        number = self.seen.requests
        self.seen.running += 1
        self.seen.most_running = max(self.seen.most_running, self.seen.running)
        try:
            if not body.get("stream"):
                return await self._whole(list(events), body)
            broken = bool(self.pace.break_every) and number % self.pace.break_every == 0
            return await self._stream(request, events, broken)
        finally:
            self.seen.running -= 1

    async def _whole(self, events: list[dict[str, Any]], body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(self.pace.gap_s * len(events))
        if "choices" not in events[0]:
            return web.json_response(events[-1])
        texts = [_chunk_text(choice) for event in events for choice in event["choices"]]
        last = {"message": {"content": "".join(texts)}, "text": "".join(texts), "finish_reason": "length"}
        wanted = body.get("max_tokens") or body["max_completion_tokens"]
        return web.json_response({"choices": [last], "usage": _usage(wanted)})

    async def _stream(
        self, request: web.Request, events: Iterator[dict[str, Any]], broken: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        async for number, event in _paced(events, self.pace.gap_s):
            if broken and number == 2:
                event = {"error": {"message": "broken on purpose"}}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            if "error" in event:
                break
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _paced(events: Iterator[dict[str, Any]], gap_s: float) -> AsyncIterator[tuple[int, dict[str, Any]]]:
    for number, event in enumerate(events):
        if number:
            await asyncio.sleep(gap_s)
        yield number, event


def _native_rows(body: dict[str, Any]) -> list[Any]:
    """The prompts of a request, one or several."""
    given = body.get("input_ids") or body["text"]
    return given if isinstance(given, list) and given and isinstance(given[0], list) else [given]


def _counts(wanted: int, step: int) -> list[tuple[int, int]]:
    """(tokens before, tokens after) of every event."""
    ends = [*range(step, wanted, step), wanted]
    return list(zip([0, *ends], ends, strict=False))


def _native_events(rows: int, wanted: int, pace: Pace, index: str) -> Iterator[dict[str, Any]]:
    for begin, end in _counts(wanted, pace.tokens_per_event):
        first = begin if pace.incremental else 0
        finish = {"type": "length", "length": wanted} if end == wanted else None
        for row in range(rows):
            meta = {"completion_tokens": end, "prompt_tokens": 7, "cached_tokens": 2, "finish_reason": finish}
            text = "".join(f"w{i} " for i in range(first, end))
            event = {"text": text, "output_ids": list(range(first, end)), "meta_info": meta}
            yield {**event, index: row} if index else event


def _openai_events(body: dict[str, Any], wanted: int, pace: Pace, chat: bool) -> Iterator[dict[str, Any]]:
    options = body.get("stream_options") or {}
    if chat:
        role = {"role": "assistant", "content": ""}
        yield {"choices": [{"index": 0, "delta": role, "finish_reason": None}]}
    for begin, end in _counts(wanted, pace.tokens_per_event):
        text = "".join(f"w{i} " for i in range(begin, end))
        said = {"delta": {"content": text}} if chat else {"text": text}
        chunk = {"choices": [{"index": 0, **said, "finish_reason": "length" if end == wanted else None}]}
        counted = pace.usage and options.get("continuous_usage_stats")
        yield {**chunk, "usage": _usage(end)} if counted else chunk
    if pace.usage and options.get("include_usage"):
        yield {"choices": [], "usage": _usage(wanted)}


def _usage(count: int) -> dict[str, Any]:
    return {"prompt_tokens": 7, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}


def _chunk_text(choice: dict[str, Any]) -> str:
    said: str = (choice.get("delta") or choice).get("content") or choice.get("text") or ""
    return said


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--gap-ms", type=float, default=100.0)
    parser.add_argument("--tokens-per-event", type=int, default=1)
    flags = parser.parse_args()
    pace = Pace(flags.gap_ms / 1000, flags.tokens_per_event)
    web.run_app(
        FakeServer(pace).app(), host="127.0.0.1", port=flags.port, print=None, access_log=None, backlog=8192
    )


if __name__ == "__main__":
    main()
