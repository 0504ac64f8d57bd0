"""POST /parse_function_call and /separate_reasoning: the parsers alone, for a text that is there."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import error_response, native_error, read_json
from sglang.srt.entrypoints.openai.reply_format import check_tools, tool_names
from sglang.srt.function_call.events import CallArguments, CallStart, Text
from sglang.srt.function_call.registry import TOOL_FORMATS
from sglang.srt.managers.text_request import RequestError
from sglang.srt.parser.reasoning import REASONING_FORMATS, Reasoning


def parse_router() -> APIRouter:
    router = APIRouter()

    @router.post("/parse_function_call")
    async def parse_function_call(request: Request) -> Response:
        try:
            return JSONResponse(parse_calls(await read_json(request)))
        except RequestError as error:
            return error_response(error, native_error)

    @router.post("/separate_reasoning")
    async def separate_reasoning(request: Request) -> Response:
        try:
            return JSONResponse(split_reasoning(await read_json(request)))
        except RequestError as error:
            return error_response(error, native_error)

    return router


def parse_calls(body: Any) -> dict[str, Any]:
    """
    Raises:
        RequestError: the body is not {text, tools, tool_call_parser}.
    """
    text, name = _fields(body, "tool_call_parser", tuple(TOOL_FORMATS))
    tools = body.get("tools") or []
    check_tools(tools)
    parser = TOOL_FORMATS[name].parser(tool_names(tools))
    rest, calls = "", list[dict[str, Any]]()
    for event in [*parser.push(text), *parser.finish()]:
        if isinstance(event, Text):
            rest += event.text
        elif isinstance(event, CallStart):
            calls.append({"tool_index": len(calls), "name": event.name, "parameters": ""})
        elif isinstance(event, CallArguments):
            calls[-1]["parameters"] += event.text
    return {"normal_text": rest, "calls": calls}


def split_reasoning(body: Any) -> dict[str, Any]:
    """A text that ends a reasoning without having begun one began inside it.

    Raises:
        RequestError: the body is not {text, reasoning_parser}.
    """
    text, name = _fields(body, "reasoning_parser", tuple(REASONING_FORMATS))
    form = REASONING_FORMATS[name]
    begins = text.lstrip().startswith(form.begin)
    parser = form.parser(is_open=form.always or (form.end in text and not begins))
    events = [*parser.push(text), *parser.finish()]
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    return {
        "reasoning_text": thought,
        "text": "".join(event.text for event in events if isinstance(event, Text)),
    }


def _fields(body: Any, parser: str, names: tuple[str, ...]) -> tuple[str, str]:
    if not isinstance(body, dict) or not isinstance(body.get("text"), str):
        raise RequestError("the body must be a JSON object with text, a string")
    if body.get(parser) not in names:
        raise RequestError(f"{parser} must be one of {', '.join(names)}")
    return body["text"], body[parser]
