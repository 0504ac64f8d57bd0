"""Makes the trace that a client's headers name the one in which its request is. Needs opentelemetry."""

from __future__ import annotations

from opentelemetry import context
from opentelemetry.propagate import extract
from starlette.types import ASGIApp, Receive, Scope, Send


class TraceMiddleware:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        token = context.attach(extract(headers))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)
