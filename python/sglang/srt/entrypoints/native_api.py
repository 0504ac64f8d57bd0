"""SGLang's own endpoints: generation, control of the server, and what it says about itself."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sglang.srt.entrypoints.answering import (
    EventStream,
    error_response,
    finished_or_gone,
    gone_response,
    native_error,
    read_json,
)
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.custom_labels import labelled
from sglang.srt.entrypoints.fed_stream import FedStream
from sglang.srt.entrypoints.middleware import may_administrate
from sglang.srt.entrypoints.native_answer import NativeAnswers, NativeFeed, may_be_large
from sglang.srt.entrypoints.native_request import parse_call
from sglang.srt.managers.io_struct import ControlReply
from sglang.srt.managers.text_request import RequestError, Sample
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_FLUSH_POLL_S = 0.05


class WholeAnswer(Response):
    """It keeps the samples until it has been sent: till then their memory is taken."""

    media_type = "application/json"

    def __init__(self, body: bytes, samples: list[Sample]) -> None:
        super().__init__(body)
        self.samples = samples


def native_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    _add_generation(router, context)
    _add_control(router, context)
    _add_information(router, context)
    return router


def _add_generation(router: APIRouter, context: ServerContext) -> None:
    manager = context.manager

    @router.api_route("/generate", methods=["POST", "PUT"])
    async def generate(request: Request) -> Response:
        try:
            body = await read_json(request)
            call = parse_call(body, context.args.reasoning_parser, manager.tokenizer)
            labels = body.get("custom_labels")
            group = await manager.submit(labelled(call.requests, context.args, request.headers, labels))
            answers = NativeAnswers(
                call, context.args.weight_version, context.args.incremental_streaming_output
            )
            if call.stream and may_be_large(call.requests):
                return EventStream(answers.events(group), manager, group, native_error)
            if call.stream:
                return FedStream(NativeFeed(answers, group), manager, group, native_error)
            samples = await finished_or_gone(request, manager, group)
        except RequestError as error:
            return error_response(error, native_error)
        return gone_response() if samples is None else WholeAnswer(await answers.json(samples), samples)

    @router.post("/abort_request")
    async def abort_request(request: Request) -> Response:
        try:
            body = await read_json(request)
            rid = body.get("rid") if isinstance(body, dict) else None
            abort_all = isinstance(body, dict) and body.get("abort_all") is True
            if not abort_all and not (isinstance(rid, str) and rid):
                raise RequestError('give {"rid": "…"} or {"abort_all": true}')
            if abort_all and not may_administrate(request.scope):
                raise RequestError("ending the requests of everybody needs the admin key", 401)
        except RequestError as error:
            return error_response(error, native_error)
        if abort_all:
            manager.abort_all("aborted by /abort_request")
        else:
            manager.abort(str(rid), "aborted by /abort_request")
        return Response(status_code=200)


def _add_control(router: APIRouter, context: ServerContext) -> None:
    manager = context.manager

    @router.api_route("/flush_cache", methods=["GET", "POST"])
    async def flush_cache(timeout: float = 0.0) -> Response:
        try:
            reply = await _flushed(manager, timeout)
        except RequestError as error:
            return error_response(error, native_error)
        if not reply.ok:
            return PlainTextResponse(f"{reply.error}\n", status_code=400)
        return PlainTextResponse("Cache flushed.\nPlease check backend logs for more details.\n")

    @router.api_route("/set_internal_state", methods=["POST", "PUT"])
    async def set_internal_state(request: Request) -> Response:
        try:
            body = await read_json(request)
            changes = body.get("server_args") if isinstance(body, dict) else None
            if not isinstance(changes, dict) or not changes:
                raise RequestError('the body must be {"server_args": {name: value}}')
            reply = await manager.set_state(changes)
            if not reply.ok:
                raise RequestError(reply.error)
        except RequestError as error:
            return error_response(error, native_error)
        return JSONResponse({"updated": True, "server_args": reply.body})


async def _flushed(manager: TokenizerManager, timeout_s: float) -> ControlReply:
    """Waits up to ``timeout_s`` for the requests that run to end."""
    deadline = time.monotonic() + timeout_s
    reply = await manager.flush_cache()
    while not reply.ok and manager.failure is None and time.monotonic() < deadline:
        await asyncio.sleep(_FLUSH_POLL_S)
        reply = await manager.flush_cache()
    return reply


def _add_information(router: APIRouter, context: ServerContext) -> None:
    @router.get("/model_info")
    @router.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return context.model_info()

    @router.get("/server_info")
    @router.get("/get_server_info")
    async def server_info() -> Response:
        try:
            return JSONResponse({**await context.server_info(), "frontend": "python"})
        except RequestError as error:
            return error_response(error, native_error)
