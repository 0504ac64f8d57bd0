"""A short way for the events of a stream, of which there are thousands a second.

Middlewares look at how an answer begins and hand its body on, each through a coroutine of its own. So a
stream begins through all of them and sends what follows as the server gave it.
"""

from __future__ import annotations

import inspect
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from sglang.srt.entrypoints.pushes import Pushes

_BODY_SEND: Final = "sglang.body_send"
_PUSHES: Final = "sglang.pushes"


class BodySends:
    """The outermost of all."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._pushes = Pushes()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[_BODY_SEND] = send
        if inspect.iscoroutinefunction(send):
            scope[_PUSHES] = self._pushes
        await self._app(scope, receive, send)


def body_send(scope: Scope, otherwise: Send) -> Send:
    """For an answer that has begun."""
    send: Send = scope.get(_BODY_SEND, otherwise)
    return send


def pushes_of(scope: Scope) -> Pushes | None:
    """The line of streams, where ``body_send`` is the server's own and can be begun outside a task."""
    pushes: Pushes | None = scope.get(_PUSHES)
    return pushes
