"""The OpenAI-compatible endpoints."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import error_response, openai_error, read_json
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.openai.chat import answer_chat
from sglang.srt.entrypoints.openai.completions import answer_completion
from sglang.srt.entrypoints.openai.protocol import ChatBody, CompletionBody, GenerationBody
from sglang.srt.managers.text_request import RequestError

Body = TypeVar("Body", bound=GenerationBody)


def openai_router(context: ServerContext) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions")
    async def chat_completions(request: Request) -> Response:
        try:
            return await answer_chat(request, await _read_body(request, ChatBody), context)
        except RequestError as error:
            return error_response(error, openai_error)

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        try:
            return await answer_completion(request, await _read_body(request, CompletionBody), context)
        except RequestError as error:
            return error_response(error, openai_error)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(context)]}

    @router.get("/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        if model_id == context.model_name:
            return JSONResponse(_card(context))
        error = {
            "message": f"The model {model_id!r} does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return JSONResponse({"error": error}, status_code=404)

    return router


async def _read_body(request: Request, kind: type[Body]) -> Body:
    """
    Raises:
        RequestError: the body is no JSON object.
        RequestValidationError: a field is missing or has the wrong type.
    """
    value = await read_json(request)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise RequestValidationError(
            error.errors(include_url=False, include_context=False, include_input=False)
        ) from error


def _card(context: ServerContext) -> dict[str, Any]:
    return {
        "id": context.model_name,
        "object": "model",
        "created": context.created_ts,
        "owned_by": "sglang",
        "root": context.model_name,
        "parent": None,
        "max_model_len": context.manager.limits.context_len,
    }
