"""Around every request: who may ask, how much it may send, and how many have."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sglang.srt.entrypoints.error_shapes import http_error_body, own_shape
from sglang.srt.managers.text_request import RequestError

_OPEN_PREFIXES: Final = ("/health", "/ready", "/ping", "/metrics")  # probes and Prometheus have no key
_OPEN_PATHS: Final = frozenset({"/dashboard"})  # a page without figures: it asks for them with a key
_ADMIN_PATHS: Final = frozenset(
    {"/set_internal_state", "/flush_cache", "/pause_generation", "/continue_generation", "/configure_logging"}
)
_ADMIN: Final = "sglang.is_admin"  # in a scope; absent where nobody asks for keys
RETRY_AFTER_S: Final = 1
_MEGABYTE: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class Keys:
    api: str | None
    admin: str | None

    def opens(self, path: str, given: frozenset[bytes]) -> bool:
        """The admin key opens everything; without one the other key does."""
        wanted = self.admin if path in _ADMIN_PATHS and self.admin is not None else self.api
        if wanted is None or path.startswith(_OPEN_PREFIXES) or path in _OPEN_PATHS:
            return True
        return _is_one_of(given, wanted) or self.is_admin(given)

    def is_admin(self, given: frozenset[bytes]) -> bool:
        return self.admin is not None and _is_one_of(given, self.admin)


def _is_one_of(given: frozenset[bytes], key: str) -> bool:
    expected = key.encode()
    return any([hmac.compare_digest(one, expected) for one in given])  # every one: no early end


def may_administrate(scope: Mapping[str, Any]) -> bool:
    """For what an endpoint does only for some: as ``_ADMIN_PATHS`` are."""
    return bool(scope.get(_ADMIN, True))


class ApiKeyMiddleware:
    """A key is sent as ``Authorization: Bearer KEY`` or, as Anthropic's clients do, ``x-api-key: KEY``."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = _given_keys(scope)
            if scope["method"] != "OPTIONS" and not self._keys.opens(route_path(scope), given):
                await _unauthorized(route_path(scope))(scope, receive, send)
                return
            scope[_ADMIN] = self._keys.admin is None or self._keys.is_admin(given)
        await self._app(scope, receive, send)


def _unauthorized(path: str) -> JSONResponse:
    shape = own_shape(path)
    body = {"error": "Unauthorized"} if shape is None else shape(RequestError("Unauthorized", 401))
    return JSONResponse(body, status_code=401)


def _given_keys(scope: Scope) -> frozenset[bytes]:
    headers = dict(scope["headers"])
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    keys = [bearer.strip()] if scheme.lower() == b"bearer" else []
    return frozenset(key for key in (*keys, headers.get(b"x-api-key", b"")) if key)


def route_path(scope: Mapping[str, Any]) -> str:
    """As the router sees it: a proxy may or may not have cut off the path that it serves us below."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(f"{root}/") else path


class RootPathMiddleware:
    """Below which path of a proxy the server is. The proxy may cut it off or not; the outermost of all."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["root_path"] = self._root_path
        await self._app(scope, receive, send)


class LimitsMiddleware:
    """Refuses bodies that are too large (413), and says with every 503 when to come again."""

    def __init__(self, app: ASGIApp, max_body_mb: int) -> None:
        self._app = app
        self._max_body = max_body_mb * _MEGABYTE
        self._message = f"the request's body has more than {max_body_mb} MB (--max-request-body-mb)"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and int(declared) > self._max_body:
            body = http_error_body(route_path(scope), 413, self._message)
            response = JSONResponse(body, status_code=413, headers={"connection": "close"})
            await response(scope, receive, send)
            return
        size = 0

        async def counting_receive() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._max_body:  # it did not say how large it is
                raise HTTPException(413, self._message)
            return message

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] == 503:
                MutableHeaders(scope=message).setdefault("retry-after", str(RETRY_AFTER_S))
            await send(message)

        await self._app(scope, counting_receive, sending)


class RequestCountMiddleware:
    """http_requests_total and http_responses_total, by route (not by path: those are without number)."""

    def __init__(self, app: ASGIApp) -> None:
        from prometheus_client import Counter

        self._app = app
        names = ("endpoint", "method")
        self._requests = Counter("sglang:http_requests_total", "HTTP requests.", names)
        self._responses = Counter("sglang:http_responses_total", "HTTP responses.", (*names, "status_code"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counting_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                labels = self._labels(scope)
                self._requests.labels(*labels).inc()
                self._responses.labels(*labels, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, counting_send)

    @staticmethod
    def _labels(scope: Scope) -> tuple[str, str]:
        route: Any = scope.get("route")  # set by the router; absent for an unknown path
        return getattr(route, "path", "unknown"), scope["method"]
