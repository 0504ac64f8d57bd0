"""OpenAI's responses: POST /v1/responses, and what is asked of one that was kept."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import (
    EventStream,
    StreamForm,
    error_response,
    finished_or_gone,
    gone_response,
    read_json,
)
from sglang.srt.entrypoints.bodies import validated
from sglang.srt.entrypoints.context import ServerContext, new_rid
from sglang.srt.entrypoints.custom_labels import labelled
from sglang.srt.entrypoints.error_shapes import nested_error
from sglang.srt.entrypoints.openai.chat import prepare_chat
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs
from sglang.srt.entrypoints.openai.reply_format import reasoning_tokens
from sglang.srt.entrypoints.responses.body import ResponsesBody
from sglang.srt.entrypoints.responses.input_items import items_page
from sglang.srt.entrypoints.responses.items import Event
from sglang.srt.entrypoints.responses.run import CONTINUABLE, Asked, ResponseRun
from sglang.srt.entrypoints.responses.store import ResponseStore
from sglang.srt.entrypoints.responses.talk import Item
from sglang.srt.managers.text_request import Group, RequestError, Sample, TextRequest

_FOREIGN_NAME: Final = re.compile(r"\bmax_tokens(?= must)")  # chat completions' name, in what they refuse
_NOT_KEPT: Final = "a server with --tokenizer-worker-num above 1 keeps no responses"


def responses_router(context: ServerContext) -> APIRouter:
    router, desk = APIRouter(prefix="/v1/responses"), _Desk(context)

    @router.post("")
    async def create(request: Request) -> Response:
        try:
            return await desk.create(request, validated(ResponsesBody, await read_json(request)))
        except RequestError as error:
            return error_response(error, nested_error)

    @router.get("/{response_id}")
    async def retrieve(response_id: str, stream: bool = False, starting_after: int | None = None) -> Response:
        try:
            return desk.retrieve(response_id, stream, starting_after)
        except RequestError as error:
            return error_response(error, nested_error)

    @router.get("/{response_id}/input_items")
    async def input_items(
        response_id: str,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
        order: Literal["asc", "desc"] = "desc",
    ) -> Response:
        try:
            return JSONResponse(desk.input_items(response_id, after, limit, order == "desc"))
        except RequestError as error:
            return error_response(error, nested_error)

    @router.post("/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        try:
            return await desk.cancel(response_id)
        except RequestError as error:
            return error_response(error, nested_error)

    @router.delete("/{response_id}")
    async def delete(response_id: str) -> Response:
        try:
            return desk.delete(response_id)
        except RequestError as error:
            return error_response(error, nested_error)

    return router


class _Desk:
    def __init__(self, context: ServerContext) -> None:
        self._context = context
        self._manager = context.manager
        self._store = ResponseStore()
        self._keeps = context.args.tokenizer_worker_num == 1  # else another process may be asked for it

    async def create(self, request: Request, body: ResponsesBody) -> Response:
        asked_text, asked = self._asked(body)
        group = await self._manager.submit(labelled([asked_text], self._context.args, request.headers))
        run = ResponseRun(asked)
        if asked.in_background:
            self._store.put(run)
            run.task = asyncio.create_task(self._in_background(run, group))
            return self._stream_kept(run, -1) if body.stream else JSONResponse(run.response())
        events = self._kept_at_the_end(run, group, keep=bool(asked.given["store"]))
        if body.stream:
            return EventStream(events, self._manager, group, nested_error, STREAM_FORM)
        if await finished_or_gone(request, self._manager, group) is None:
            return gone_response()
        async for _ in events:
            pass
        return JSONResponse(run.response())

    def retrieve(self, response_id: str, stream: bool, starting_after: int | None) -> Response:
        run = self._find(response_id)
        if not stream:
            return JSONResponse(run.response())
        if not run.asked.keeps_events:
            raise RequestError(
                "only a response that was made with background and stream can be streamed again"
            )
        return self._stream_kept(run, -1 if starting_after is None else max(-1, starting_after))

    def input_items(self, response_id: str, after: str | None, limit: int, newest_first: bool) -> Item:
        """Those of the responses it went on from, too: the model has read them all."""
        return items_page(self._find(response_id).asked.talk, after, limit, newest_first)

    async def cancel(self, response_id: str) -> Response:
        run = self._find(response_id)
        if not run.asked.in_background:
            raise RequestError("only a response that was made with background can be cancelled")
        if not run.has_ended and run.task is not None:
            self._manager.abort(response_id, "cancelled")
            await asyncio.shield(run.task)
        return JSONResponse(run.response())

    def delete(self, response_id: str) -> Response:
        run = self._find(response_id)
        if not run.has_ended:
            self._manager.abort(response_id, "deleted")
        self._store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    def _find(self, response_id: str) -> ResponseRun:
        run = self._store.get(response_id)
        if run is None:
            reason = "it was not stored, or it has been forgotten" if self._keeps else _NOT_KEPT
            raise RequestError(f"there is no response {response_id!r}: {reason}", 404)
        return run

    def _asked(self, body: ResponsesBody) -> tuple[TextRequest, Asked]:
        if body.background and not self._keeps:
            raise RequestError(f"background can't be had: {_NOT_KEPT}")
        talk = [*self._talk_before(body), *body.items()]
        rid = f"resp_{new_rid()}"
        chat = body.chat_body(talk, rid)
        try:
            request, form = prepare_chat(chat, self._context)
        except RequestError as error:
            message = _FOREIGN_NAME.sub("max_output_tokens", str(error))
            raise RequestError(message, error.status_code, error.code) from error

        def count_reasoning(sample: Sample) -> int:
            return reasoning_tokens(sample, form, self._manager.tokenizer)

        def logprobs(sample: Sample, begin: int) -> list[Item]:
            shown = chat_logprobs(sample, begin, len(sample.output_ids), self._manager.tokenizer)
            content: list[Item] = [] if shown is None else shown["content"]
            return content

        background = bool(body.background)
        given = self._given(body, request)
        keeps_events = background and bool(body.stream)
        return request, Asked(rid, given, talk, form, count_reasoning, logprobs, keeps_events, background)

    def _talk_before(self, body: ResponsesBody) -> list[Item]:
        if body.previous_response_id is None:
            return []
        before = self._find(body.previous_response_id)
        if before.status not in CONTINUABLE:
            raise RequestError(
                f"previous_response_id: that response is {before.status}, and can't be gone on from"
            )
        return before.talk

    def _given(self, body: ResponsesBody, request: TextRequest) -> Item:
        defaults = self._context.sampling_defaults()

        def used(name: str) -> Any:
            value = getattr(body, name)
            return defaults.get(name, 1.0) if value is None else value

        reasoning, text = body.reasoning or {}, body.text or {}
        return {
            "model": body.model or self._context.model_name,
            "instructions": body.instructions,
            "previous_response_id": body.previous_response_id,
            "max_output_tokens": body.max_output_tokens,
            "temperature": used("temperature"),
            "top_p": used("top_p"),
            "tools": body.tools or [],
            "tool_choice": body.tool_choice or "auto",
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "text": {"format": text.get("format") or {"type": "text"}, "verbosity": "medium"},
            "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
            "store": body.store is not False and self._keeps,
            "background": bool(body.background),
            "truncation": "disabled",
            "service_tier": "default",
            "top_logprobs": body.top_logprobs or 0,
            **body.echoed(),
            "metadata": body.echoed()["metadata"] or {},
        }

    async def _in_background(self, run: ResponseRun, group: Group) -> None:
        await run.in_background(group)
        if self._store.get(run.asked.id) is run:  # else it has been deleted
            self._store.put(run)

    async def _kept_at_the_end(self, run: ResponseRun, group: Group, keep: bool) -> AsyncIterator[Event]:
        """Kept before its end is told: who hears of it may ask for it."""
        async for event in run.events(group):
            if keep and run.has_ended:
                self._store.put(run)
                keep = False
            yield event

    def _stream_kept(self, run: ResponseRun, after: int) -> Response:
        """Whoever listens may go away: the response is made all the same."""
        return EventStream(run.kept_events(after), self._manager, Group(), nested_error, STREAM_FORM)


def _encode(event: Event) -> bytes:
    return f"event: {event.get('type', 'error')}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"


STREAM_FORM = StreamForm(_encode, nested_error, b"")
