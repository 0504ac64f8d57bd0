"""Answers to clients that may go away, and the two shapes of errors."""

from __future__ import annotations

import asyncio
import json
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from sglang.srt.entrypoints.body_sends import body_send, pushes_of
from sglang.srt.entrypoints.pushes import Pushes
from sglang.srt.managers.text_request import Group, RequestError, Sample
from sglang.srt.managers.tokenizer_manager import TokenizerManager

T = TypeVar("T")

CLIENT_GONE = "the client went away"
DONE = b"data: [DONE]\n\n"
_CLIENT_CLOSED_REQUEST = 499  # nobody reads it
_LONGEST_MESSAGE = 1000  # characters: a message quotes what the client sent, which may be megabytes
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")

ErrorShape = Callable[[RequestError], dict[str, Any]]


def error_message(error: object) -> str:
    """The text of an error, as it may be sent to a client."""
    text = str(error)
    return text if len(text) <= _LONGEST_MESSAGE else text[:_LONGEST_MESSAGE] + "…"


def native_error(error: RequestError) -> dict[str, Any]:
    return {"error": {"message": error_message(error)}}


def openai_error(error: RequestError) -> dict[str, Any]:
    kinds = {
        400: "BadRequestError",
        401: "Unauthorized",
        404: "NotFoundError",
        503: "ServiceUnavailableError",
    }
    kind = kinds.get(error.status_code, "InternalServerError")
    code = error.code or error.status_code
    return {
        "object": "error",
        "message": error_message(error),
        "type": kind,
        "param": None,
        "code": code,
    }


def error_response(error: RequestError, shape: ErrorShape) -> JSONResponse:
    return JSONResponse(shape(error), status_code=error.status_code)


def raise_if_failed(sample: Sample) -> None:
    if sample.has_failed:
        assert sample.finish is not None and sample.finish.status_code is not None
        raise RequestError(sample.finish.message or "the request was aborted", sample.finish.status_code)


async def read_json(request: Request) -> Any:
    """
    Raises:
        RequestError: the body is no JSON, or not said to be JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise RequestError(
            f"the content type must be application/json, got {kind or 'none'}"
            " (curl: -H 'Content-Type: application/json')"
        )
    try:
        text = (await request.body()).decode("utf-8-sig")
        value = json.loads(text)
        if _SURROGATE_ESCAPE.search(text):  # a pair of them is one character, half a pair is none
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError("the body is not valid Unicode: it has a lone surrogate") from error
    except RecursionError as error:
        raise RequestError("the body is nested too deeply") from error
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    return value


async def finished_or_gone(request: Request, manager: TokenizerManager, group: Group) -> list[Sample] | None:
    """All samples, finished; None if the client went away first (they are aborted then).

    Raises:
        RequestError: one of them has failed.
    """
    try:
        samples = await _unless_gone(group.finished(), request.receive)
    finally:
        manager.abort_group(group, CLIENT_GONE)  # does nothing to finished samples
    for sample in samples or []:
        raise_if_failed(sample)
    return samples


def gone_response() -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _unless_gone(work: Coroutine[Any, Any, T], receive: Receive) -> T | None:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_wait_until_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        watching.cancel()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


@dataclass(frozen=True, slots=True)
class StreamForm:
    """How events, an error among them, and the end of a stream are written."""

    encode: Callable[[dict[str, Any]], bytes]
    error: ErrorShape
    end: bytes


class StreamedResponse(Response, ABC):
    """Server-sent events. An error before the first event is an ordinary error response."""

    media_type = "text/event-stream"

    def __init__(self, manager: TokenizerManager, group: Group, shape: ErrorShape) -> None:
        super().__init__(headers={"cache-control": "no-cache"}, media_type=self.media_type)
        del self.headers["content-length"]
        self._manager = manager
        self._group = group
        self._shape = shape
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = self._send_all(send, body_send(scope, send), pushes_of(scope))
        try:
            error = await _unless_gone(sending, receive)
            if error is not None:
                await error_response(error, self._shape)(scope, receive, send)
        finally:
            self._manager.abort_group(self._group, CLIENT_GONE)

    @abstractmethod
    async def _send_all(self, start: Send, send: Send, pushes: Pushes | None) -> RequestError | None:
        """``start``: for how the answer begins; ``send``: for its body. The error with which it failed before
        it began.
        """

    async def _begin(self, start: Send) -> None:
        self._started = True
        await start({"type": "http.response.start", "status": 200, "headers": self.raw_headers})


class EventStream(StreamedResponse):
    """Of events that are waited for one by one."""

    def __init__(
        self,
        events: AsyncIterator[dict[str, Any]],
        manager: TokenizerManager,
        group: Group,
        shape: ErrorShape,
        form: StreamForm | None = None,
    ) -> None:
        super().__init__(manager, group, shape)
        self._events = events
        self._form = form or StreamForm(encoded_event, stream_error, DONE)

    async def _send_all(self, start: Send, send: Send, pushes: Pushes | None) -> RequestError | None:
        encode = self._form.encode
        try:
            async for event in self._events:
                if not self._started:
                    await self._begin(start)
                await send({"type": "http.response.body", "body": encode(event), "more_body": True})
        except RequestError as error:
            if not self._started:
                return error
            data = encode(self._form.error(error))
            await send({"type": "http.response.body", "body": data, "more_body": True})
        if not self._started:
            await self._begin(start)
        await send({"type": "http.response.body", "body": self._form.end, "more_body": False})
        return None


def stream_error(error: RequestError) -> dict[str, Any]:
    retryable = error.status_code >= 500
    kind = "internal_server_error" if retryable else "invalid_request_error"
    message = error_message(error)
    return {"error": {"message": message, "type": kind, "code": error.status_code, "retryable": retryable}}


def encoded_event(value: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(value) + b"\n\n"
