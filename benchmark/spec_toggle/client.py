"""What a finished stream says about its request, and the server's own account of itself.

Streams themselves are in `streams.py`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx


class GenerationError(RuntimeError):
    """The server answered a request with an error, or ended its stream early."""


class ServerRefusal(RuntimeError):
    """The server did not accept a setting; its reason is in the message."""


@dataclass(frozen=True, slots=True)
class StreamTrace:
    """One finished request: when its tokens arrived, and what the server said about it."""

    started: float  # time.perf_counter() when the request was sent
    times: tuple[float, ...]  # [events] arrival of each event that brought tokens, same clock
    counts: tuple[int, ...]  # [events] tokens received up to and including that event
    output_ids: tuple[int, ...]  # () where the server doesn't tell them
    meta: dict[str, Any]  # meta_info of the last event; what of it is known over the OpenAI endpoints
    text: str = ""


def open_client(
    base_url: str, timeout_s: float = 600.0, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client for questions and settings; ``timeout_s`` bounds each wait for the server."""
    timeout = httpx.Timeout(timeout_s, connect=10.0)
    return httpx.AsyncClient(base_url=base_url, timeout=timeout, headers=headers)


def parse_trace(started: float, received: Sequence[tuple[float, bytes]]) -> StreamTrace:
    """Turn the raw events of one request into its trace.

    Raises:
        GenerationError: an event carries an error, or the stream ended before the request did.
    """
    times: list[float] = []
    counts: list[int] = []
    last: dict[str, Any] = {}
    for arrived, data in received:
        last = json.loads(data)
        if "error" in last:
            raise GenerationError(f"the stream ended with an error: {last['error']}")
        count = int(last["meta_info"]["completion_tokens"])
        if not counts or count > counts[-1]:
            times.append(arrived)
            counts.append(count)
    meta = last.get("meta_info", {})
    require_finished(meta.get("finish_reason"))
    ids = tuple(last.get("output_ids") or ())
    return StreamTrace(started, tuple(times), tuple(counts), ids, meta, str(last.get("text") or ""))


def require_finished(reason: Mapping[str, Any] | None) -> None:
    """
    Raises:
        GenerationError: the stream ended before its request, or by an abort.
    """
    if not reason:
        raise GenerationError("the stream ended before the request was finished")
    if reason.get("type") == "abort":
        raise GenerationError(f"the server aborted a request: {reason.get('message')}")


async def server_info(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return ``GET /server_info``."""
    response = await client.get("/server_info")
    response.raise_for_status()
    info: dict[str, Any] = response.json()
    return info


async def internal_state(client: httpx.AsyncClient) -> dict[str, Any]:
    """Return ``internal_states[0]`` of ``GET /server_info``."""
    state: dict[str, Any] = (await server_info(client))["internal_states"][0]
    return state


async def metric(client: httpx.AsyncClient, name: str) -> float | None:
    """Return the sum over labels of a gauge or counter of ``GET /metrics``; None where there is none."""
    response = await client.get("/metrics")
    if response.status_code != 200:
        return None
    lines = [line for line in response.text.splitlines() if re.match(rf"{re.escape(name)}[{{ ]", line)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines) if lines else None


async def set_internal_state(client: httpx.AsyncClient, changes: dict[str, Any]) -> None:
    """Change ``server_args`` of the running server.

    Raises:
        ServerRefusal: the server did not take them.
    """
    response = await client.post("/set_internal_state", json={"server_args": changes})
    if response.status_code != 200:
        raise ServerRefusal(f"the server refused {changes}: {response.text[:300]}")
