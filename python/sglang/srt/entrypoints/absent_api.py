"""Endpoints that SGLang has and this server does not: each is refused by name, with what to do instead."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from sglang.srt.entrypoints.answering import ErrorShape, error_response, native_error, openai_error
from sglang.srt.managers.text_request import RequestError

_TEXT_ONLY: Final = "this server generates text and nothing else: embeddings and scores need another server"
_NO_AUDIO: Final = "this server takes and makes text alone"
_NO_LORA: Final = "serve a merged checkpoint instead"
_NO_UPDATES: Final = "start a new server with the other weights"
_NO_SESSIONS: Final = "send the whole conversation: what it has in common with an earlier one is cached"
_NO_OLLAMA: Final = "use /v1/chat/completions or /v1/completions"
_NO_PROFILE: Final = "python -m sglang.bench_one_batch --profile profiles a step"
_OF_THE_MODEL: Final = "GET /model_info has it"
_HERE: Final = "there is nothing to switch on this server"

_OPENAI: Final[dict[str, str]] = {
    **{f"/v1/{name}": _TEXT_ONLY for name in ("embeddings", "classify", "rerank", "score", "decisions")},
    "/v1/audio/transcriptions": _NO_AUDIO,
    "/v1/realtime": _NO_AUDIO,
    "/v1/load_lora_adapter": _NO_LORA,
    "/v1/unload_lora_adapter": _NO_LORA,
}
_NATIVE: Final[dict[str, str]] = {
    "/encode": _TEXT_ONLY,
    "/classify": _TEXT_ONLY,
    "/weight_version": _OF_THE_MODEL,
    "/get_weight_version": _OF_THE_MODEL,
    "/invocations": "send it to /v1/chat/completions",
    "/vertex_generate": "send it to /generate",
    **{f"/api/{name}": _NO_OLLAMA for name in ("chat", "generate", "tags", "show", "version")},
    **{
        f"/{name}": _NO_LORA
        for name in ("load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter")
    },
    **{
        f"/{name}": _NO_UPDATES
        for name in (
            "update_weights_from_disk",
            "update_weights_from_tensor",
            "update_weights_from_distributed",
            "update_weights_from_ipc",
            "init_weights_update_group",
            "destroy_weights_update_group",
            "begin_weight_update",
            "end_weight_update",
            "update_weight_version",
            "get_weights_by_name",
            "weights_checker",
            "release_memory_occupation",
            "resume_memory_occupation",
        )
    },
    "/open_session": _NO_SESSIONS,
    "/close_session": _NO_SESSIONS,
    "/start_profile": _NO_PROFILE,
    "/stop_profile": _NO_PROFILE,
    **{
        f"/{name}": _HERE
        for name in (
            "slow_down",
            "freeze_gc",
            "set_trace_level",
            "pd_role_switch",
            "add_external_corpus",
            "remove_external_corpus",
            "list_external_corpora",
            "start_expert_distribution_record",
            "stop_expert_distribution_record",
            "dump_expert_distribution_record",
            "hicache/storage-backend",
        )
    },
}
ABSENT: Final = _OPENAI | _NATIVE


def absent_router() -> APIRouter:
    router = APIRouter()
    for paths, shape in ((_OPENAI, openai_error), (_NATIVE, native_error)):
        for path in paths:
            router.add_api_route(
                path, _refusing(shape), methods=["GET", "POST", "PUT", "DELETE"], include_in_schema=False
            )
    return router


def _refusing(shape: ErrorShape) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(request: Request) -> Response:
        path = request.scope["route"].path
        message = f"SGLang has {path}; this server does not: {ABSENT[path]}"
        return error_response(RequestError(message, 404), shape)

    return refuse
