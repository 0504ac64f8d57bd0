"""Anthropic's endpoints: POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from fastapi import APIRouter
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
from sglang.srt.entrypoints.bodies import validated
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.custom_labels import labelled
from sglang.srt.entrypoints.error_shapes import anthropic_error
from sglang.srt.entrypoints.openai.chat import prepare_chat
from sglang.srt.managers.text_request import RequestError


def anthropic_router(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/v1/messages")

    @router.post("")
    async def messages(request: Request) -> Response:
        try:
            return await _answer(request, validated(MessagesBody, await read_json(request)), context)
        except RequestError as error:
            return error_response(error, anthropic_error)

    @router.post("/count_tokens")
    async def count_tokens(request: Request) -> Response:
        try:
            asked, _ = prepare_chat(chat_body(validated(PromptBody, await read_json(request))), context)
            return JSONResponse({"input_tokens": len(await context.manager.tokenize(asked))})
        except RequestError as error:
            return error_response(error, anthropic_error)

    return router


async def _answer(request: Request, body: MessagesBody, context: ServerContext) -> Response:
    asked, form = prepare_chat(chat_body(body), context)
    group = await context.manager.submit(labelled([asked], context.args, request.headers))
    name, model = str(asked.rid), body.model or context.model_name
    if body.stream:
        made = events(name, model, group, form)
        return EventStream(made, context.manager, group, anthropic_error, STREAM_FORM)
    samples = await finished_or_gone(request, context.manager, group)
    return gone_response() if samples is None else JSONResponse(whole(name, model, samples[0], form))
