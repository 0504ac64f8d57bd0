"""Keys, limits of bodies, Retry-After, and the drain. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.drain import Drain
from sglang.srt.entrypoints.middleware import (
    ApiKeyMiddleware,
    Keys,
    LimitsMiddleware,
    RootPathMiddleware,
    may_administrate,
)

PATHS = ("/generate", "/set_internal_state", "/flush_cache", "/v1/models")
OPEN = ("/health", "/health_generate", "/ready", "/ping", "/metrics", "/dashboard")
ADMIN = ("/set_internal_state", "/flush_cache")


def make_app(keys: Keys | None = None, max_mb: int = 1, root_path: str = "") -> FastAPI:
    app = FastAPI()

    async def answer(request: Request) -> Response:
        body = await request.body()
        return JSONResponse({"size": len(body), "admin": may_administrate(request.scope)})

    for path in (*PATHS, *OPEN):
        app.add_api_route(path, answer, methods=["GET", "POST"], response_model=None)

    @app.get("/busy")
    async def busy() -> Response:
        return Response(status_code=503)

    if keys is not None:
        app.add_middleware(ApiKeyMiddleware, keys=keys)
    app.add_middleware(LimitsMiddleware, max_body_mb=max_mb)
    if root_path:
        app.add_middleware(RootPathMiddleware, root_path=root_path)
    return app


def ask(app: FastAPI, path: str, method: str = "POST", **kwargs: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            return await client.request(method, path, **kwargs)

    return asyncio.run(send())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# SGLang's rule, with one more: the admin key opens what the other key does.
@pytest.mark.parametrize(
    "keys, path, opened_by",
    [
        (Keys(None, None), "/generate", {"", "a", "b"}),
        (Keys("a", None), "/generate", {"a"}),
        (Keys("a", None), "/set_internal_state", {"a"}),
        (Keys(None, "b"), "/generate", {"", "a", "b"}),
        (Keys(None, "b"), "/flush_cache", {"b"}),
        (Keys("a", "b"), "/generate", {"a", "b"}),
        (Keys("a", "b"), "/set_internal_state", {"b"}),
    ],
)
def test_who_may_ask(keys: Keys, path: str, opened_by: set[str]) -> None:
    app = make_app(keys)
    for key in ("", "a", "b"):
        status = 200 if key in opened_by else 401
        assert ask(app, path, headers=bearer(key) if key else {}).status_code == status, key
        assert ask(app, path, headers={"x-api-key": key} if key else {}).status_code == status, key
    assert all(ask(app, open_path).status_code == 200 for open_path in OPEN)


def test_abort_all_and_the_like_know_an_admin() -> None:
    app = make_app(Keys("a", "b"))
    assert ask(app, "/generate", headers=bearer("b")).json()["admin"]
    assert not ask(app, "/generate", headers=bearer("a")).json()["admin"]
    assert ask(make_app(Keys("a", None)), "/generate", headers=bearer("a")).json()["admin"]
    assert ask(make_app(), "/generate").json()["admin"]


def test_no_way_around_the_admin_key() -> None:
    app = make_app(Keys(None, "b"), root_path="/below")
    for path in ("/below/set_internal_state", "/set_internal_state", "/%73et_internal_state"):
        assert ask(app, path).status_code == 401, path
        assert ask(app, path, headers=bearer("b")).status_code == 200, path
    for path in ("/set_internal_state/", "//set_internal_state", "/below//set_internal_state"):
        assert ask(app, path).status_code in (307, 401, 404), path
    assert ask(app, "/below/generate").status_code == 200


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1), st.binary())
def test_no_other_key_opens(key: str, other: bytes) -> None:
    keys = Keys(key, None)
    assert keys.opens("/generate", frozenset([key.encode()]))
    assert keys.opens("/generate", frozenset([other])) == (other == key.encode())
    assert not keys.opens("/generate", frozenset())


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not() -> None:
    app = make_app()
    assert ask(app, "/generate", content=b"x" * 1_000_000).json()["size"] == 1_000_000
    declared = ask(app, "/generate", content=b"x" * 1_000_001)
    assert declared.status_code == 413 and "--max-request-body-mb" in declared.json()["message"]

    async def pieces() -> Any:
        for _ in range(11):
            yield b"x" * 100_000

    assert ask(app, "/generate", content=pieces()).status_code == 413


def test_a_refusal_for_now_says_when_to_come_again() -> None:
    response = ask(make_app(), "/busy", "GET")
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    assert "retry-after" not in ask(make_app(), "/generate").headers


class FakeManager(SimpleNamespace):
    closing: str | None = None
    failure: str | None = None
    num_running = 1


def drained(limit_s: float, ends_after_s: float, signals: int = 1) -> tuple[float, FakeManager]:
    """Seconds until the stop, which must come once."""
    stops: list[float] = []
    manager = FakeManager()

    async def run() -> float:
        loop = asyncio.get_running_loop()
        drain = Drain(manager, limit_s, "closing", lambda: stops.append(loop.time()))  # type: ignore[arg-type]
        began = loop.time()
        for _ in range(signals):
            drain.begin()
        await asyncio.sleep(ends_after_s)
        manager.num_running = 0
        await asyncio.sleep(0.1)
        assert len(stops) == 1
        return stops[0] - began

    return asyncio.run(run()), manager


def test_the_drain_waits_for_what_runs_but_not_for_ever() -> None:
    seconds, manager = drained(limit_s=60, ends_after_s=0.15)
    assert 0.15 <= seconds < 0.3 and manager.closing == "closing"
    assert drained(limit_s=0.1, ends_after_s=0.4)[0] < 0.3
    assert drained(limit_s=0, ends_after_s=0.2)[0] < 0.1
    assert drained(limit_s=60, ends_after_s=0.2, signals=2)[0] < 0.1  # the second one means it
