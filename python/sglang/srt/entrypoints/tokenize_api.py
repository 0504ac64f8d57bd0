"""POST /v1/tokenize and /v1/detokenize, also without /v1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import error_response, openai_error, read_json
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.sampling.sampling_params import SamplingParams


def tokenize_router(context: ServerContext) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize")
    @router.post("/v1/tokenize")
    async def tokenize(request: Request) -> Response:
        try:
            return JSONResponse(await _tokenized(await read_json(request), context))
        except RequestError as error:
            return error_response(error, openai_error)

    @router.post("/detokenize")
    @router.post("/v1/detokenize")
    async def detokenize(request: Request) -> Response:
        try:
            return JSONResponse(_detokenized(await read_json(request), context))
        except RequestError as error:
            return error_response(error, openai_error)

    return router


async def _tokenized(body: Any, context: ServerContext) -> dict[str, Any]:
    prompt = body.get("prompt") if isinstance(body, dict) else None
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
        raise RequestError("prompt must be a string or a list of strings")
    special = _boolean(body, "add_special_tokens")
    ids = [await _ids(text, special, context) for text in prompts]
    counts = [len(tokens) for tokens in ids]
    whole = isinstance(prompt, str)
    return {
        "tokens": ids[0] if whole else ids,
        "count": counts[0] if whole else counts,
        "max_model_len": context.manager.limits.context_len,
    }


async def _ids(text: str, special: bool, context: ServerContext) -> list[int]:
    """An empty text has no tokens, which as a prompt is an error, but for those that are always added."""
    if not text:
        return context.manager.tokenizer.encode(text, special)
    return await context.manager.tokenize(TextRequest(text, SamplingParams(), add_special_tokens=special))


def _detokenized(body: Any, context: ServerContext) -> dict[str, Any]:
    tokens = body.get("tokens") if isinstance(body, dict) else None
    several = isinstance(tokens, list) and bool(tokens) and all(isinstance(ids, list) for ids in tokens)
    lists: list[Any] = list(tokens) if several and isinstance(tokens, list) else [tokens]
    vocab_size = context.manager.limits.vocab_size
    for ids in lists:
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            raise RequestError(
                f"tokens must be a list of token ids (0 to {vocab_size - 1}), or a list of such lists"
            )
    skip = _boolean(body, "skip_special_tokens")
    texts = [context.manager.tokenizer.decode(ids, skip) for ids in lists]
    return {"text": texts if several else texts[0]}


def _boolean(body: Any, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")
    return value is not False
