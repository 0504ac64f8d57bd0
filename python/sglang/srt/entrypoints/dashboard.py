"""GET /dashboard, a page that shows the server at work, and /dashboard/data, what it asks for every second.

The page has no figures in it and needs no key. It loads nothing from anywhere but this server.
"""

from __future__ import annotations

from importlib import resources
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import error_response, native_error
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.managers.text_request import RequestError
from sglang.version import __version__

_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_SHOWN: Final = (
    "num_running_reqs",
    "num_queue_reqs",
    "is_paused",
    "decode_steps",
    "effective_max_running_requests_per_dp",
    "spec_draft_len",
    "spec_switches",
    "spec_accept_by_position",
    "avg_spec_accept_length",
    "speculative_disable_bs_threshold",
    "speculative_bs_schedule",
)


def dashboard_router(context: ServerContext) -> APIRouter:
    router = APIRouter()
    page = resources.files("sglang.srt.entrypoints").joinpath("dashboard.html").read_text(encoding="utf-8")
    headers = {
        "content-security-policy": _POLICY,
        "cache-control": "no-cache",
        "x-content-type-options": "nosniff",
    }

    @router.get("/dashboard")
    async def dashboard() -> Response:
        return Response(page, media_type="text/html", headers=headers)

    @router.get("/dashboard/data")
    async def data(after: int = 0) -> Response:
        try:
            state = await context.manager.get_state(after_step=max(0, min(after, 2**53)))
        except RequestError as error:
            return error_response(error, native_error)
        return JSONResponse(_shown(context, state), headers={"cache-control": "no-store"})

    return router


def _shown(context: ServerContext, state: dict[str, Any]) -> dict[str, Any]:
    """A figure that has no value yet, or needs a drafter on a server without one, is absent."""
    return {
        "model": context.model_name,
        "version": __version__,
        "started_ts": context.started_ts,
        **{name: state[name] for name in _SHOWN if name in state},
        **state["live"],
    }
