"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import EventStream, finished_or_gone, gone_response, openai_error
from sglang.srt.entrypoints.context import ServerContext, new_rid
from sglang.srt.entrypoints.openai.answers import ending, stream_chunks, usage
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.srt.managers.text_request import Delta, RequestError, Sample, TextRequest

_ROLES = ("system", "developer", "user", "assistant", "tool")


async def answer_chat(request: Request, body: ChatBody, context: ServerContext) -> Response:
    """
    Raises:
        RequestError: the request can't be served.
    """
    body.refuse_unsupported()
    manager = context.manager
    text_request = chat_request(body, context)
    group = await manager.submit([text_request])
    envelope = {
        "id": text_request.rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model or context.model_name,
    }
    if body.stream:
        envelope["object"] = "chat.completion.chunk"
        events = stream_chunks(envelope, group, _Deltas().choices, body.stream_options)
        return EventStream(events, manager, group, openai_error)
    samples = await finished_or_gone(request, manager, group)
    if samples is None:
        return gone_response()
    choices = [_choice(index, sample) for index, sample in enumerate(samples)]
    return JSONResponse({**envelope, "choices": choices, "usage": usage(samples)})


def chat_request(body: ChatBody, context: ServerContext) -> TextRequest:
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return TextRequest(
        prompt=_render(body, context) if body.input_ids is None else body.input_ids,
        sampling=body.sampling(context.sampling_defaults(), most),
        rid=body.rid or new_rid(),
        stream=body.stream,
        add_special_tokens=False,  # the template has written them
    )


def _render(body: ChatBody, context: ServerContext) -> str:
    if context.chat_template is None:
        raise RequestError(
            "the model has no chat template: start the server with --chat-template FILE,"
            " or use /v1/completions"
        )
    if not body.messages:
        raise RequestError("messages must not be empty")
    messages = [_message(message) for message in body.messages]
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return context.chat_template.render(messages, options, body.continue_final_message)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, which is what templates for text expect."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RequestError(f"a message's role must be one of {', '.join(_ROLES)}; got {role!r}")
    if isinstance(content, str) or (content is None and role == "assistant"):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        raise RequestError(f"the content of a {role} message must be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"a content part of type {kind!r} is not supported: only text is")
        texts.append(part["text"])
    return {**message, "content": " ".join(texts)}


def _choice(index: int, sample: Sample) -> dict[str, Any]:
    message = {"role": "assistant", "content": sample.text, "reasoning_content": None, "tool_calls": None}
    return {"index": index, "message": message, "logprobs": None, **ending(sample)}


class _Deltas:
    """Choices of a stream: the role first, then the text, then how it ended."""

    def __init__(self) -> None:
        self._opened: set[int] = set()

    def choices(self, index: int, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
        made = []
        if index not in self._opened:
            self._opened.add(index)
            made.append(_delta(index, {"role": "assistant", "content": ""}))
        if delta.text:
            made.append(_delta(index, {"content": delta.text}))
        if sample.finish is not None:
            made.append({**_delta(index, {}), **ending(sample)})
        return made


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
