"""Errors in the shape of the interface that a path belongs to, also where a request reaches no endpoint."""

from __future__ import annotations

from typing import Any, Final

from sglang.srt.entrypoints.answering import ErrorShape, error_message, openai_error
from sglang.srt.managers.text_request import RequestError

_ANTHROPIC_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: RequestError) -> dict[str, Any]:
    default = "api_error" if error.status_code >= 500 else "invalid_request_error"
    kind = _ANTHROPIC_KINDS.get(error.status_code, default)
    return {"type": "error", "error": {"type": kind, "message": error_message(error)}}


def nested_error(error: RequestError) -> dict[str, Any]:
    """OpenAI's own: what its clients read is below ``error``."""
    kind = "server_error" if error.status_code >= 500 else "invalid_request_error"
    return {"error": {"message": error_message(error), "type": kind, "param": None, "code": _code(error)}}


def _code(error: RequestError) -> Any:
    return error.code or {401: "invalid_api_key", 404: "not_found"}.get(error.status_code)


_SHAPES: Final[dict[str, ErrorShape]] = {"/v1/messages": anthropic_error, "/v1/responses": nested_error}


def own_shape(path: str) -> ErrorShape | None:
    """Of an interface with a shape of its own; None elsewhere."""
    below = (shape for prefix, shape in _SHAPES.items() if path == prefix or path.startswith(f"{prefix}/"))
    return next(below, None)


def http_error_body(path: str, status_code: int, message: str, kind: str | None = None) -> dict[str, Any]:
    shape = own_shape(path)
    if shape is not None:
        return shape(RequestError(message, status_code))
    if status_code == 500:
        return openai_error(RequestError(message, status_code))
    return {
        "object": "error",
        "message": message,
        "type": kind or str(status_code),
        "param": None,
        "code": status_code,
    }
