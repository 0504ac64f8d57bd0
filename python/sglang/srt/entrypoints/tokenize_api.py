"""POST /v1/tokenize (of a text, or of a chat's messages) and /v1/detokenize, also without /v1."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import error_response, openai_error, read_json
from sglang.srt.entrypoints.bodies import validated
from sglang.srt.entrypoints.context import ServerContext
from sglang.srt.entrypoints.openai.chat import chat_prompt
from sglang.srt.entrypoints.openai.protocol import ChatBody, Messages
from sglang.srt.entrypoints.openai.reply_format import offered_tools
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


class ChatToTokenize(BaseModel):
    """Names and defaults are vLLM's, which SGLang has too."""

    messages: Messages
    add_generation_prompt: bool | None = None  # true, unless the last message is to be continued
    continue_final_message: bool = False
    add_special_tokens: bool = False
    tools: Messages | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    def prompt(self, context: ServerContext) -> str:
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError("add_generation_prompt and continue_final_message can't both be true")
        names = {"messages", "continue_final_message", "tools", "chat_template_kwargs", "reasoning_effort"}
        chat = validated(ChatBody, self.model_dump(include=names))
        return chat_prompt(chat, context, offered_tools(chat), self.add_generation_prompt is not False)


async def _tokenized(body: Any, context: ServerContext) -> dict[str, Any]:
    if isinstance(body, dict) and body.get("messages") is not None:
        if body.get("prompt") is not None:
            raise RequestError("give either prompt or messages")
        chat = validated(ChatToTokenize, body)
        ids = await _ids(chat.prompt(context), chat.add_special_tokens, context)
        return {"tokens": ids, "count": len(ids), "max_model_len": context.manager.limits.context_len}
    prompt = body.get("prompt") if isinstance(body, dict) else None
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not all(isinstance(text, str) for text in prompts):
        raise RequestError("prompt must be a string or a list of strings (or give messages)")
    special = _boolean(body, "add_special_tokens")
    lists = [await _ids(text, special, context) for text in prompts]
    counts = [len(tokens) for tokens in lists]
    whole = isinstance(prompt, str)
    return {
        "tokens": lists[0] if whole else lists,
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
