"""POST /v1/chat/completions."""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import finished_or_gone, gone_response, openai_error
from sglang.srt.entrypoints.context import ServerContext, new_rid
from sglang.srt.entrypoints.custom_labels import labelled
from sglang.srt.entrypoints.fed_stream import FedStream
from sglang.srt.entrypoints.openai.answers import ChunkFeed
from sglang.srt.entrypoints.openai.chat_choices import StreamChoices, whole_choice
from sglang.srt.entrypoints.openai.extras import Extras, add_chat_extras, refuse_streamed
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.srt.entrypoints.openai.reply_format import (
    forced_calls,
    needs_special_tokens,
    offered_tools,
    reasoning_end,
    reasoning_tokens,
    reply_format,
)
from sglang.srt.entrypoints.reasoning_ends import prompt_end, with_thinking
from sglang.srt.entrypoints.text_only import refused_part
from sglang.srt.managers.text_request import RequestError, Sample, TextRequest
from sglang.srt.parser.reply import ReplyFormat

_ROLES = ("system", "developer", "user", "assistant", "tool")


async def answer_chat(request: Request, body: ChatBody, context: ServerContext) -> Response:
    """
    Raises:
        RequestError: the request can't be served.
    """
    manager, extras = context.manager, Extras.of(body, context.args)
    refuse_streamed(body)
    text_request, form = prepare_chat(body, context)
    group = await manager.submit(labelled([text_request], context.args, request.headers))
    envelope = {
        "id": text_request.rid,
        "object": "chat.completion",
        "created": int(time.time()),
        "model": body.model or context.model_name,
    }

    def count_reasoning(sample: Sample) -> int:
        return reasoning_tokens(sample, form, manager.tokenizer)

    if body.stream:
        envelope["object"] = "chat.completion.chunk"
        choices = StreamChoices(form, manager.tokenizer).choices
        feed = ChunkFeed(envelope, group, choices, body.stream_options, extras, count_reasoning)
        return FedStream(feed, manager, group, openai_error)
    samples = await finished_or_gone(request, manager, group)
    if samples is None:
        return gone_response()
    whole = [whole_choice(index, sample, form, manager.tokenizer) for index, sample in enumerate(samples)]
    add_chat_extras(whole, samples, body, context.args.weight_version)
    told = {"usage": extras.usage(samples, count_reasoning), **extras.envelope(samples)}
    return JSONResponse({**envelope, "choices": whole, **told})


def prepare_chat(body: ChatBody, context: ServerContext) -> tuple[TextRequest, ReplyFormat]:
    """What is sent to the model, and how its reply is to be read.

    Raises:
        RequestError: the request can't be served.
    """
    body.refuse_unsupported()
    tokenizer = context.manager.tokenizer
    tools = offered_tools(body)
    text_request = chat_request(body, context, tools)
    end = prompt_end(text_request.prompt, tokenizer)
    form = reply_format(body, context.args, tools, end)
    where = reasoning_end(body, context.args, end, tokenizer)
    asked = replace(text_request, reasoning_end=where)
    return with_thinking(asked, context.args.reasoning_parser, tokenizer, is_known=True), form


def chat_request(body: ChatBody, context: ServerContext, tools: list[dict[str, Any]]) -> TextRequest:
    schema = forced_calls(body, tools)
    if body.skip_special_tokens is None and needs_special_tokens(body, context.args, tools):
        body = body.model_copy(update={"skip_special_tokens": False})
    if schema is not None:
        body = body.model_copy(update={"json_schema": schema})
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return TextRequest(
        prompt=chat_prompt(body, context, tools) if body.input_ids is None else body.input_ids,
        sampling=body.sampling(context.sampling_defaults(), most),
        rid=body.rid or new_rid(),
        stream=body.stream,
        add_special_tokens=False,  # the template has written them
        wish=body.wish(),
        logprob_texts=True,
        **body.scheduling(),
    )


def chat_prompt(
    body: ChatBody, context: ServerContext, tools: list[dict[str, Any]], asks_for_reply: bool = True
) -> str:
    """
    Raises:
        RequestError: the model has no template for such messages.
    """
    if context.chat_template is None:
        raise RequestError(
            "the model has no chat template: start the server with --chat-template FILE,"
            " or use /v1/completions"
        )
    if not body.messages:
        raise RequestError("messages must not be empty")
    if tools and not context.chat_template.takes_tools:
        raise RequestError(
            "the model's chat template takes no tools: start the server with --chat-template FILE"
        )
    messages = [_message(message) for message in body.messages]
    options = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
    return context.chat_template.render(messages, options, body.continue_final_message, tools, asks_for_reply)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """The message with its content as one string, which is what templates for text expect."""
    role, content = message.get("role"), message.get("content")
    if role not in _ROLES:
        raise RequestError(f"a message's role must be one of {', '.join(_ROLES)}; got {role!r}")
    if role == "assistant" and message.get("tool_calls"):
        message = {**message, "tool_calls": _calls(message["tool_calls"])}
    if isinstance(content, str) or (content is None and role == "assistant"):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        raise RequestError(f"the content of a {role} message must be a string or a list of parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(refused_part(f"the content of a {role} message", kind))
        texts.append(part["text"])
    return {**message, "content": " ".join(texts)}


def _calls(calls: Any) -> list[dict[str, Any]]:
    """With arguments as objects, which is how templates read them; clients send them as JSON text."""
    read = []
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, dict) else None
        if call is None or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError("each of a message's tool_calls must have a function with a name")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # a template may take the text itself
                arguments = json.loads(arguments) if arguments.strip() else {}
        read.append({**call, "function": {**function, "arguments": arguments}})
    return read
