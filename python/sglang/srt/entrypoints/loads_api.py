"""GET /v1/loads and /get_load: how busy the server is, for whoever spreads requests over several of them.

Under SGLang's names; ``loads`` has one entry, since there is one scheduler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Final

from fastapi import APIRouter
from starlette.responses import JSONResponse, PlainTextResponse, Response

from sglang.srt.entrypoints.answering import error_response, native_error, openai_error
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.managers.text_request import RequestError
from sglang.version import __version__

_SECTIONS: Final = {
    "memory": "memory",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
    "queues": "queues",
}
_INCLUDABLE: Final = ("core", *_SECTIONS, "all")
_NO_STEPS: Final = 2**53  # of the live part, the figures alone


def loads_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/loads")
    async def loads(include: str = "all", dp_rank: int = 0, format: str = "json") -> Response:
        try:
            asked = _asked(include)
            if dp_rank != 0:
                raise RequestError(f"there is one scheduler: dp_rank must be 0, got {dp_rank}")
            if format not in ("json", "prometheus"):
                raise RequestError(f"format must be json or prometheus, got {format!r}")
            state = await context.manager.get_state(after_step=_NO_STEPS)
        except RequestError as error:
            return error_response(error, openai_error)
        load = {**_core(state), **{name: part for name, part in _sections(state, asked) if part is not None}}
        if format == "prometheus":
            return PlainTextResponse("".join(_lines(load)))
        now = datetime.now(UTC).isoformat()
        return JSONResponse({"timestamp": now, "version": __version__, "loads": [load]})

    @router.get("/get_load")
    async def get_load() -> Response:
        """What SGLang's gateway asks of servers before they had /v1/loads, and still does."""
        try:
            state = await context.manager.get_state(after_step=_NO_STEPS)
        except RequestError as error:
            return error_response(error, native_error)
        return JSONResponse([_early_form(state)])

    return router


def _early_form(state: dict[str, Any]) -> dict[str, Any]:
    core = _core(state)
    waiting = core["num_waiting_reqs"]
    return {
        "dp_rank": core["dp_rank"],
        "num_reqs": core["num_running_reqs"] + waiting,
        "num_waiting_reqs": waiting,
        "num_tokens": core["num_used_tokens"],
        "num_pending_tokens": state["live"].get("num_pending_tokens", 0),
        "ts_tic": time.monotonic(),
    }


def _asked(include: str) -> set[str]:
    asked = {name.strip() for name in include.split(",")}
    unknown = sorted(asked - set(_INCLUDABLE))
    if unknown:
        raise RequestError(
            f"include must be of {', '.join(_INCLUDABLE)}; got {', '.join(map(repr, unknown))}"
        )
    return set(_SECTIONS) if "all" in asked else asked


def _core(state: dict[str, Any]) -> dict[str, Any]:
    live, capacity = state["live"], state["memory_usage"]["token_capacity"]
    running, most = state["num_running_reqs"], state["effective_max_running_requests_per_dp"]
    used = live.get("kv_used_tokens", 0)
    return {
        "timestamp": time.time(),
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": state["num_queue_reqs"],
        "num_used_tokens": used,
        "max_total_num_tokens": capacity,
        "max_running_requests": most,
        "token_usage": round(used / capacity, 4),
        "gen_throughput": round(state["last_gen_throughput"], 2),
        "utilization": round(running / most, 4),
    }


def _sections(state: dict[str, Any], asked: set[str]) -> Iterator[tuple[str, dict[str, Any] | None]]:
    for name, title in _SECTIONS.items():
        if name in asked:
            yield title, _section(name, state)


def _section(name: str, state: dict[str, Any]) -> dict[str, Any] | None:
    """None for one that this server, or a server without a drafter, does not have."""
    if name == "memory":
        memory = state["memory_usage"]
        return {
            "weight_gb": memory["weight"],
            "kv_cache_gb": memory["kvcache"],
            "graph_gb": state.get("decode_cuda_graph_memory_gb", 0.0),
            "token_capacity": memory["token_capacity"],
        }
    if name == "spec" and "spec_accept_by_position" in state:
        return {
            "accept_length": state.get("avg_spec_accept_length", 0.0),
            "accept_rate": state.get("avg_spec_accept_rate", 0.0),
        }
    if name == "disagg":
        return {"mode": "null"}
    if name == "queues":
        live = state["live"]
        names = {"grammar": "num_grammar_queue_reqs", "paused": "num_paused_reqs"}
        return {"waiting": state["num_queue_reqs"], **{ours: live.get(key, 0) for ours, key in names.items()}}
    return None


_PREFIXES: Final = {"speculative": "spec", "disaggregation": "disagg"}


def _lines(load: dict[str, Any], prefix: str = "sglang") -> Iterator[str]:
    """As Prometheus reads them; what is no number is left out."""
    for name, value in load.items():
        if isinstance(value, dict):
            yield from _lines(value, f"{prefix}_{_PREFIXES.get(name, name)}")
        elif isinstance(value, int | float) and name not in ("timestamp", "dp_rank"):
            yield f'# TYPE {prefix}_{name} gauge\n{prefix}_{name}{{dp_rank="0"}} {value}\n'
