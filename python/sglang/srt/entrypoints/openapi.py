"""GET /openapi.json: what this server answers to, from its routes and the types that read their bodies."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.openapi_schemas import REF, Schema, body_schemas
from sglang.version import __version__

_JSON, _TEXT, _EVENTS = "application/json", "text/plain", "text/event-stream"


@dataclass(frozen=True, slots=True)
class Operation:
    summary: str
    body: str | None = None  # name of its schema
    answers: tuple[str, ...] = (_JSON,)  # content types with status 200; none: an empty answer
    error: str = "NativeError"  # the shape of what a handler refuses; what never reaches one: OpenAIError
    needs_body: bool = True
    statuses: tuple[int, ...] = ()  # further ones


_STREAMED: Final = (_JSON, _EVENTS)
_OPENAI: Final = "OpenAIError"
_EVERYWHERE: Final = ("AnthropicError", "ResponsesError")  # also what never reaches a handler
OPERATIONS: Final[dict[str, Operation]] = {
    "/generate": Operation("Continue a prompt, or several", "GenerateBody", _STREAMED),
    "/abort_request": Operation("End a request, or all", "AbortBody", ()),
    "/flush_cache": Operation("Forget cached prefixes, if nothing runs", None, (_TEXT,)),
    "/set_internal_state": Operation("Change the mode of the steps", "InternalStateBody"),
    "/model_info": Operation("The model"),
    "/get_model_info": Operation("The model (old name)"),
    "/server_info": Operation("The server's arguments and figures"),
    "/get_server_info": Operation("The server's arguments and figures (old name)"),
    "/pause_generation": Operation("Stand still", "PauseBody", needs_body=False),
    "/continue_generation": Operation("Go on", "ContinueBody", needs_body=False),
    "/configure_logging": Operation("Change what is logged of requests", "LoggingBody", needs_body=False),
    "/dashboard": Operation("A page that shows the server at work", None, ("text/html",)),
    "/dashboard/data": Operation("The page's figures"),
    "/": Operation("Whether the server lives", None, ()),
    "/health": Operation("Whether the server lives", None, ()),
    "/ready": Operation("Whether the server lives", None, ()),
    "/ping": Operation("Whether the server lives", None, ()),
    "/health_generate": Operation("Whether tokens come out", None, ()),
    "/metrics": Operation("Metrics for Prometheus", None, (_TEXT,)),
    "/v1/chat/completions": Operation("OpenAI's chat completions", "ChatBody", _STREAMED, _OPENAI),
    "/v1/completions": Operation("OpenAI's completions", "CompletionBody", _STREAMED, _OPENAI),
    "/v1/responses": Operation(
        "OpenAI's responses", "ResponsesBody", _STREAMED, "ResponsesError", statuses=(404,)
    ),
    "/v1/responses/{response_id}": Operation(
        "A response that was stored", None, _STREAMED, "ResponsesError", statuses=(404,)
    ),
    "/v1/responses/{response_id}/cancel": Operation(
        "End a response in the background", error="ResponsesError", statuses=(404,)
    ),
    "/v1/responses/{response_id}/input_items": Operation(
        "What a response replied to", error="ResponsesError", statuses=(404,)
    ),
    "/v1/loads": Operation("How busy the server is", None, (_JSON, _TEXT), _OPENAI),
    "/get_load": Operation("How busy the server is, in SGLang's early form"),
    "/v1/models": Operation("The models: one"),
    "/v1/models/{model_id}": Operation("The model of that name", error="NestedError", statuses=(404,)),
    "/v1/messages": Operation("Anthropic's messages", "MessagesBody", _STREAMED, "AnthropicError"),
    "/v1/messages/count_tokens": Operation(
        "Tokens of Anthropic's messages", "PromptBody", error="AnthropicError"
    ),
    **{
        f"{prefix}/{name}": Operation(summary, body, error=_OPENAI)
        for prefix in ("", "/v1")
        for name, summary, body in (
            ("tokenize", "Text as tokens", "TokenizeBody"),
            ("detokenize", "Tokens as text", "DetokenizeBody"),
        )
    },
    "/parse_function_call": Operation("Calls of tools in a text", "ParseFunctionCallBody"),
    "/separate_reasoning": Operation("Reasoning and reply of a text", "SeparateReasoningBody"),
}

_REFUSALS: Final = {
    400: "The request is wrong; the message says how",
    401: "A key is needed",
    413: "The body is too large",
    500: "The server failed, or the request did",
    503: "Too busy, or ending; Retry-After says when to come again",
}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


_STRING: Final = {"type": "string"}
_OR_NONE: Final = {"type": ["string", "null"]}
_ERRORS: Final[dict[str, Schema]] = {
    "NativeError": _object(error=_object(message=_STRING)),
    "OpenAIError": _object(
        object={"const": "error"},
        message=_STRING,
        type=_STRING,
        param=_OR_NONE,
        code={"type": ["integer", "string"]},
    ),
    "NestedError": _object(error=_object(message=_STRING, type=_STRING, param=_OR_NONE, code=_STRING)),
    "ResponsesError": _object(error=_object(message=_STRING, type=_STRING, param=_OR_NONE, code=_OR_NONE)),
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=_STRING, message=_STRING)),
    "Unauthorized": _object(error=_STRING),
}


def openapi_router(app: FastAPI, vocab_size: int) -> APIRouter:
    router = APIRouter()

    @cache
    def document() -> dict[str, Any]:  # by then all routes are there
        return openapi_document(app, vocab_size)

    @router.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return JSONResponse(document())

    return router


def openapi_document(app: FastAPI, vocab_size: int) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a handler of two methods; its ids are made below
        made = get_openapi(title=app.title, version=__version__, routes=app.routes)
    for path, methods in made["paths"].items():
        for method, found in methods.items():
            methods[method] = _operation(path, method, found)
    made["components"] = {"schemas": body_schemas(vocab_size) | _ERRORS, "securitySchemes": _SECURITY}
    made["security"] = [{}, *({name: []} for name in _SECURITY)]
    return made


_SECURITY: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def _operation(path: str, method: str, found: dict[str, Any]) -> dict[str, Any]:
    known = OPERATIONS.get(path) or Operation(found["summary"])
    made: dict[str, Any] = {
        "summary": known.summary,
        "operationId": "_".join([method, *path.replace("{", "").replace("}", "").split("/")[1:]]),
        "responses": dict(_responses(known)),
    }
    if "parameters" in found:
        made["parameters"] = found["parameters"]
    if known.body is not None and method in ("post", "put"):
        made["requestBody"] = {"required": known.needs_body, "content": {_JSON: {"schema": _ref(known.body)}}}
    if path.startswith("/get_"):
        made["deprecated"] = True
    return made


def _responses(known: Operation) -> Iterator[tuple[str, Any]]:
    answer: dict[str, Any] = {"description": "The answer"}
    if known.answers:
        answer["content"] = {kind: {"schema": {}} for kind in known.answers}
    yield "200", answer
    for status in (*_REFUSALS, *known.statuses):
        shapes = ["Unauthorized"] if status == 401 else sorted({known.error, _OPENAI})
        if known.error in _EVERYWHERE:
            shapes = [known.error]
        if status == 401 and known.error == "NativeError":
            shapes.append("NativeError")  # what only some may do
        content: dict[str, Any] = {_JSON: {"schema": {"anyOf": [_ref(shape) for shape in shapes]}}}
        if status == 400 and _TEXT in known.answers:
            content[_TEXT] = {"schema": {}}
        described: dict[str, Any] = {"description": _REFUSALS.get(status, "There is no such thing")}
        yield str(status), described | ({"content": content} if known.answers or status != 503 else {})


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(model=name)}
