"""Anthropic's endpoints: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import TypeVar

from fastapi import APIRouter
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import (
    EventStream,
    error_response,
    finished_or_gone,
    gone_response,
    read_json,
)
from sglang.srt.entrypoints.anthropic.answers import STREAM_FORM, events, whole
from sglang.srt.entrypoints.anthropic.messages import MessagesBody, PromptBody, chat_body
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.error_shapes import anthropic_error
from sglang.srt.entrypoints.openai.chat import prepare_chat
from sglang.srt.managers.text_request import RequestError

Body = TypeVar("Body", bound=PromptBody)


def anthropic_router(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/v1/messages")

    @router.post("")
    async def messages(request: Request) -> Response:
        try:
            return await _answer(request, await _read(request, MessagesBody), context)
        except RequestError as error:
            return error_response(error, anthropic_error)

    @router.post("/count_tokens")
    async def count_tokens(request: Request) -> Response:
        try:
            asked, _ = prepare_chat(chat_body(await _read(request, PromptBody)), context)
            return JSONResponse({"input_tokens": len(await context.manager.tokenize(asked))})
        except RequestError as error:
            return error_response(error, anthropic_error)

    return router


async def _read(request: Request, kind: type[Body]) -> Body:
    try:
        return kind.model_validate(await read_json(request))
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()]
        raise RequestError("; ".join(lines)) from error


async def _answer(request: Request, body: MessagesBody, context: ServerContext) -> Response:
    asked, form = prepare_chat(chat_body(body), context)
    group = await context.manager.submit([asked])
    name, model = str(asked.rid), body.model or context.model_name
    if body.stream:
        made = events(name, model, group, form)
        return EventStream(made, context.manager, group, anthropic_error, STREAM_FORM)
    samples = await finished_or_gone(request, context.manager, group)
    return gone_response() if samples is None else JSONResponse(whole(name, model, samples[0], form))
