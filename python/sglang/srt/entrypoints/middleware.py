"""Around every request: who may ask, and how many have."""

from __future__ import annotations

import hmac
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_OPEN_PATHS = ("/health", "/metrics")


class ApiKeyMiddleware:
    """Requires ``Authorization: Bearer KEY``, except for health and metrics."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith(_OPEN_PATHS):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                body = {"error": "Unauthorized"}
                await JSONResponse(body, status_code=401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


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
