"""POST /pause_generation and /continue_generation: a server that stands still, and goes on."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import error_response, native_error, read_json
from sglang.srt.managers.text_request import RequestError
from sglang.srt.managers.tokenizer_manager import TokenizerManager

_PAUSE_MODES: Final = ("abort", "retract", "in_place")


def admin_router(manager: TokenizerManager) -> APIRouter:
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

    return router


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
