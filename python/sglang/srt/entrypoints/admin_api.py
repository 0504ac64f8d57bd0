"""POST /pause_generation, /continue_generation (a server that stands still, and goes on) and
/configure_logging.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import error_response, native_error, read_json
from sglang.srt.managers.io_struct import LogRequests
from sglang.srt.managers.text_request import RequestError
from sglang.srt.managers.text_request_log import LEVELS, RequestLog
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_PAUSE_MODES: Final = ("abort", "retract", "in_place")


def admin_router(manager: TokenizerManager, request_log: RequestLog) -> APIRouter:
    router = APIRouter()

    @router.post("/pause_generation")
    async def pause_generation(request: Request) -> Response:
        try:
            body = await read_optional(request)
            mode = body.get("mode", "abort")
            if mode not in _PAUSE_MODES:
                raise RequestError(f"mode must be one of {', '.join(_PAUSE_MODES)}; got {mode!r}")
            await manager.pause(mode)
        except RequestError as error:
            return error_response(error, native_error)
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    @router.post("/continue_generation")
    async def continue_generation(request: Request) -> Response:
        try:
            await read_optional(request)
            await manager.resume()
        except RequestError as error:
            return error_response(error, native_error)
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    @router.post("/configure_logging")
    async def configure_logging(request: Request) -> Response:
        try:
            changed = change_logging(request_log, await read_optional(request))
            manager.tell_peers(LogRequests(request_log.enabled, request_log.level))
            return JSONResponse(changed)
        except RequestError as error:
            return error_response(error, native_error)

    return router


def change_logging(log: RequestLog, body: dict[str, Any]) -> dict[str, Any]:
    """
    Raises:
        RequestError: a field that is unknown or of the wrong type; nothing has changed.
    """
    enabled, level = body.get("log_requests", log.enabled), body.get("log_requests_level", log.level)
    unknown = sorted(set(body) - {"log_requests", "log_requests_level"})
    if unknown:
        raise RequestError(
            f"{', '.join(unknown)} can't be changed here: give log_requests or log_requests_level"
        )
    if not isinstance(enabled, bool):
        raise RequestError(f"log_requests must be true or false, got {enabled!r}")
    if type(level) is not int or level not in LEVELS:
        raise RequestError(f"log_requests_level must be 0, 1, 2 or 3; got {level!r}")
    log.enabled, log.level = enabled, level
    return {"log_requests": enabled, "log_requests_level": level}


async def read_optional(request: Request) -> dict[str, Any]:
    """The body, which may be left out.

    Raises:
        RequestError: there is one, and it is no JSON object.
    """
    if not await request.body():
        return {}
    value = await read_json(request)
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value
