"""The benchmarks' fake server, run in a thread of the test."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web
from helpers.server import free_port

from benchmark.client_streams.fake_llm import FakeServer, Pace


@contextmanager
def fake_server(pace: Pace, keep_bodies: bool = True) -> Iterator[tuple[str, FakeServer]]:
    """The base URL of a running server, and the server."""
    fake, loop, port = FakeServer(pace, keep_bodies), asyncio.new_event_loop(), free_port()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(fake.app(), access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, backlog=1024).start()
        return runner

    runner = loop.run_until_complete(start())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}", fake
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
