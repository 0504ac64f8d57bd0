"""What a benchmark asks of a server beside the requests: is it there, what does it serve, what did it do."""

from __future__ import annotations

import asyncio
import sys
import time
from typing import Any, Final

import aiohttp

from sglang.benchmark.client import FAULTS
from sglang.benchmark.stream_readers import error_text

_POLL_S: Final = 0.5
_ANSWER: Final = aiohttp.ClientTimeout(total=30)


class ServerProblem(RuntimeError):
    """The server isn't there, or isn't what was expected; the message is one line for the user."""


async def wait_until_ready(session: aiohttp.ClientSession, base_url: str, timeout_s: float) -> None:
    """Until GET /v1/models answers (any status below 500: a key may be needed); 0: don't look.

    Raises:
        ServerProblem: not in time.
    """
    deadline, reason = time.monotonic() + timeout_s, ""
    told = False
    while timeout_s > 0:
        try:
            async with session.get("v1/models", timeout=_ANSWER) as response:
                if response.status < 500:
                    return
                reason = f"HTTP {response.status}"
        except FAULTS as error:
            reason = str(error) or type(error).__name__
        if time.monotonic() > deadline:
            raise ServerProblem(
                f"no server at {base_url} within {timeout_s:g} s ({reason}):"
                " start it, or say where it is with --base-url, or --host and --port"
            )
        if not told:
            print(f"waiting up to {timeout_s:g} s for a server at {base_url} ({reason})", file=sys.stderr)
            told = True
        await asyncio.sleep(_POLL_S)


async def get_json(session: aiohttp.ClientSession, path: str) -> dict[str, Any] | None:
    """The answer to a GET; None where there is no such endpoint."""
    try:
        async with session.get(path.lstrip("/"), timeout=_ANSWER) as response:
            if response.status != 200:
                return None
            found = await response.json(content_type=None)
    except FAULTS:
        return None
    return found if isinstance(found, dict) else None


async def first_model(session: aiohttp.ClientSession) -> str:
    """
    Raises:
        ServerProblem: the server names none.
    """
    listed = (await get_json(session, "/v1/models")) or {}
    if not listed.get("data"):
        raise ServerProblem("the server's /v1/models names no model: say which with --model")
    return str(listed["data"][0]["id"])


async def tokenizer_path(session: aiohttp.ClientSession) -> str | None:
    """Where an SGLang server has its tokenizer; None where it does not say."""
    info = (await get_json(session, "/model_info")) or (await get_json(session, "/get_model_info")) or {}
    found = info.get("tokenizer_path") or info.get("model_path")
    return str(found) if found else None


async def flush_cache(session: aiohttp.ClientSession, path: str = "/flush_cache") -> None:
    """
    Raises:
        ServerProblem: the server did not.
    """
    try:
        async with session.post(path.lstrip("/"), timeout=_ANSWER) as response:
            if response.status == 200:
                return
            reason = f"HTTP {response.status}: {error_text(await response.read())}"
    except FAULTS as error:
        reason = str(error) or type(error).__name__
    raise ServerProblem(f"the server did not flush its cache ({reason})")


def internal_state(info: dict[str, Any] | None) -> dict[str, Any]:
    """``internal_states[0]`` of /server_info; {} where there is none."""
    states = (info or {}).get("internal_states") or [{}]
    found: dict[str, Any] = states[0]
    return found
