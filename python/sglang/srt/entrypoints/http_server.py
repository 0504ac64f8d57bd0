"""The HTTP server: application, listening socket, and the life from start to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import replace

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from sglang.srt.entrypoints.absent_api import absent_router
from sglang.srt.entrypoints.admin_api import admin_router
from sglang.srt.entrypoints.answering import error_message
from sglang.srt.entrypoints.anthropic.api import anthropic_router
from sglang.srt.entrypoints.body_sends import BodySends
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.dashboard import dashboard_router
from sglang.srt.entrypoints.drain import Drain
from sglang.srt.entrypoints.error_shapes import http_error_body
from sglang.srt.entrypoints.health import generates, health_router
from sglang.srt.entrypoints.http_workers import HttpWorkerConfig
from sglang.srt.entrypoints.loads_api import loads_router
from sglang.srt.entrypoints.middleware import (
    ApiKeyMiddleware,
    Keys,
    LimitsMiddleware,
    RequestCountMiddleware,
    RootPathMiddleware,
    route_path,
)
from sglang.srt.entrypoints.native_api import native_router
from sglang.srt.entrypoints.openai.api import openai_router
from sglang.srt.entrypoints.openapi import openapi_router
from sglang.srt.entrypoints.parse_api import parse_router
from sglang.srt.entrypoints.prepare import Prepared, StartError
from sglang.srt.entrypoints.responses.api import responses_router
from sglang.srt.entrypoints.server_runtime import ServerRuntime, metrics_folder
from sglang.srt.entrypoints.shared_port import bind, shared_instead
from sglang.srt.entrypoints.tokenize_api import tokenize_router
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.garbage import leave_start_alone
from sglang.srt.utils.log import say

logger = logging.getLogger(__name__)

_SHUTDOWN_GRACE_S = 1  # for answers that are being sent, once every request has been ended
_WARMUP_TIMEOUT_S = 300.0
_BACKLOG = 2048
SHUTTING_DOWN = "the server is shutting down"


def build_app(context: ServerContext) -> ASGIApp:
    args = context.args
    # Bodies are read by hand: the schema is ours too.
    app = FastAPI(title="SGLang-compatible server", openapi_url=None)
    app.include_router(native_router(context))
    app.include_router(admin_router(context.manager, context.request_log))
    app.include_router(dashboard_router(context))
    app.include_router(health_router(context.manager, args.watchdog_timeout))
    app.include_router(openai_router(context))
    app.include_router(responses_router(context))
    app.include_router(anthropic_router(context))
    app.include_router(tokenize_router(context))
    app.include_router(parse_router())
    app.include_router(loads_router(context))
    app.include_router(absent_router())
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _internal_error)
    folder = metrics_folder()
    if args.enable_metrics and folder is not None:
        from sglang.srt.entrypoints.metrics_endpoint import metrics_router

        app.include_router(metrics_router(folder))
        app.add_middleware(RequestCountMiddleware)
    app.include_router(openapi_router(app, context.manager.limits.vocab_size))
    if args.enable_trace:
        from sglang.srt.entrypoints.trace_middleware import TraceMiddleware

        app.add_middleware(TraceMiddleware)
    if args.api_key is not None or args.admin_api_key is not None:
        app.add_middleware(ApiKeyMiddleware, keys=Keys(args.api_key, args.admin_api_key))
    app.add_middleware(LimitsMiddleware, max_body_mb=args.max_request_body_mb)
    if args.fastapi_root_path is not None:
        app.add_middleware(RootPathMiddleware, root_path=args.fastapi_root_path)
    return app


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    parts = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"] if part != "body")
        parts.append(f"{place}: {item['msg']}" if place else str(item["msg"]))
    body = http_error_body(route_path(request.scope), 400, error_message("; ".join(parts)), "Bad Request")
    return JSONResponse(body, status_code=400)


async def _gone(request: Request, error: Exception) -> Response:
    """In the middle of its body. Nobody hears this; what counts requests has nginx's number for it."""
    return Response(status_code=499)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    body = http_error_body(route_path(request.scope), error.status_code, str(error.detail))
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _internal_error(request: Request, error: Exception) -> Response:
    message = f"internal error: {type(error).__name__}: {error}"
    return JSONResponse(http_error_body(route_path(request.scope), 500, message), status_code=500)


def listen(host: str, port: int) -> socket.socket:
    """The socket, bound at once, so that a port in use is an error before a model is loaded.

    Raises:
        StartError: it can't be had.
    """
    try:
        return bind(host, port)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartError(
            f"can't listen on {host}:{port}: {reason}; choose another with --host or --port"
        ) from error


def open_port(listener: socket.socket) -> None:
    """
    Raises:
        StartError: another server has opened the port since it was bound.
    """
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise StartError(
            f"can't listen on {host}:{port}: another server has opened it meanwhile;"
            " choose another with --port"
        ) from error


class HttpServer(uvicorn.Server):
    """Signals are ours: they end requests first, so that no client is left waiting."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def serve(prepared: Prepared, listener: socket.socket, launch_command: str) -> int:
    """Run until a signal or a failure; the exit code.

    Raises:
        StartError: it could not start.
    """
    runtime = await _start_unless_signalled(prepared)
    if runtime is None:
        return 0
    try:
        if runtime.workers.are_wanted:
            return await _serve_by_workers(runtime, listener, launch_command)
        return await _serve(runtime, prepared, listener, launch_command)
    finally:
        runtime.close()


async def _start_unless_signalled(prepared: Prepared) -> ServerRuntime | None:
    """Loading takes a while: Ctrl-C must work meanwhile."""
    stop = asyncio.Event()
    _on_signals({signal.SIGINT: stop.set, signal.SIGTERM: stop.set})
    starting = asyncio.create_task(ServerRuntime.start(prepared))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, StartError):
        (await starting).close()
    return None


def _on_signals(actions: Mapping[signal.Signals, Callable[[], None]]) -> None:
    loop = asyncio.get_running_loop()
    for number, action in actions.items():
        loop.add_signal_handler(number, action)


async def _serve(
    runtime: ServerRuntime, prepared: Prepared, listener: socket.socket, launch_command: str
) -> int:
    manager = runtime.manager
    assert manager is not None
    context = ServerContext(
        args=runtime.args,
        model=prepared.model,
        manager=manager,
        chat_template=prepared.chat_template,
        launch_command=launch_command,
        started_ts=runtime.started_ts,
        startup_time_s=runtime.startup_time_s,
        request_log=runtime.watching.request_log,
    )
    server = HttpServer(uvicorn_config(BodySends(build_app(context)), runtime.args.log_level_http))

    def stop() -> None:
        logger.info("Shutting down.")
        manager.fail(SHUTTING_DOWN, status_code=503)
        server.should_exit = True

    drain = Drain(manager, runtime.args.drain_timeout, SHUTTING_DOWN, stop)
    _on_signals({signal.SIGINT: stop, signal.SIGTERM: drain.begin})
    if not runtime.args.skip_server_warmup and not await _warm_up(manager):
        raise StartError(runtime.failure or "the warm-up request was not answered")
    leave_start_alone()
    open_port(listener)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    failing = asyncio.create_task(runtime.failed.wait())
    if not server.should_exit:
        _announce(runtime.args, listener)
    await asyncio.wait({serving, failing}, return_when=asyncio.FIRST_COMPLETED)
    failing.cancel()
    server.should_exit = True
    await serving
    if runtime.failure:
        say(f"error: {runtime.failure}")
        return 1
    return 0


async def _serve_by_workers(runtime: ServerRuntime, listener: socket.socket, launch_command: str) -> int:
    manager, workers, args = runtime.manager, runtime.workers, runtime.args
    assert manager is not None
    stopping = asyncio.Event()

    def stop() -> None:
        logger.info("Shutting down.")
        manager.fail(SHUTTING_DOWN, status_code=503)
        workers.stop(at_once=True)
        stopping.set()

    def drain() -> None:
        if stopping.is_set():
            stop()
        else:
            workers.stop(at_once=False)
            stopping.set()

    _on_signals({signal.SIGINT: stop, signal.SIGTERM: drain})
    if not args.skip_server_warmup and not await _warm_up(manager):
        raise StartError(runtime.failure or "the warm-up request was not answered")
    if stopping.is_set():
        return 0
    holder = shared_instead(listener)
    config = HttpWorkerConfig(
        str(runtime.folder), 0, replace(args, port=holder.getsockname()[1]), manager.limits, launch_command,
        runtime.started_ts, runtime.startup_time_s,
    )  # fmt: skip
    workers.start(config)
    ready = asyncio.create_task(workers.wait_ready(runtime.failed))
    ending = {asyncio.create_task(event.wait()) for event in (stopping, runtime.failed)}
    await asyncio.wait({ready, *ending}, return_when=asyncio.FIRST_COMPLETED)
    if is_serving := ready.done() and ready.result():
        _announce(args, holder)
        await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    if is_serving or stopping.is_set():  # one may answer already while others still start
        await workers.wait_gone(args.drain_timeout)
    for task in (ready, *ending):
        task.cancel()
    holder.close()
    if runtime.failure:
        say(f"error: {runtime.failure}")
        return 1
    return 0


def uvicorn_config(app: ASGIApp, log_level: str | None) -> uvicorn.Config:
    """A line for every request where level info is asked for."""
    return uvicorn.Config(
        app,
        log_level=log_level or "warning",
        access_log=log_level in ("debug", "info"),
        lifespan="off",
        backlog=_BACKLOG,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
    )


async def _warm_up(manager: TokenizerManager) -> bool:
    logger.info("Warming up with one request.")
    began = time.monotonic()
    ok = await generates(manager, _WARMUP_TIMEOUT_S)
    # A signal has made it fail: that is no failure of the start.
    logger.info("Warm-up took %.2f s.", time.monotonic() - began)
    return ok or manager.failure == SHUTTING_DOWN


def _announce(args: ServerArgs, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    logger.info("The server is fired up and ready to roll!")
    url += args.fastapi_root_path or ""
    key = "" if args.api_key is None else " -H 'Authorization: Bearer KEY'"
    logger.info("Listening on %s. Try:", url)
    logger.info(
        "  curl %s/v1/chat/completions%s -H 'Content-Type: application/json'"
        ' -d \'{"messages": [{"role": "user", "content": "What is a prime number?"}], "max_tokens": 64}\'',
        url,
        key,
    )
