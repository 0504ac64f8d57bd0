"""A body of Anthropic's messages as one of chat completions."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from sglang.srt.entrypoints.bodies import Body, validated
from sglang.srt.entrypoints.context import new_rid
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.srt.entrypoints.text_only import refused_part
from sglang.srt.managers.text_request import RequestError

Block = dict[str, Any]
_HARMLESS = {"metadata", "service_tier", "stream"}  # they change nothing of a reply; counting has no stream
_MEDIA = ("image", "document", "file", "container_upload")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class PromptBody(Body):
    """What makes the prompt: all that counting tokens needs."""

    model: str = ""
    messages: Annotated[list[Block], Field(fail_fast=True)]
    system: str | list[Block] | None = None
    tools: Annotated[list[Block], Field(fail_fast=True)] | None = None
    tool_choice: Block | None = None
    thinking: Block | None = None

    def chat_fields(self) -> dict[str, Any]:
        """
        Raises:
            RequestError: a block is of a kind that isn't served.
        """
        if unknown := sorted(set(self.model_extra or {}) - _HARMLESS):
            raise RequestError(f"{', '.join(unknown)}: not supported by this server; leave it out")
        messages: list[Block] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system, "system", "")})
        for message in self.messages:
            messages += _messages(message)
        fields: dict[str, Any] = {"model": self.model, "messages": messages}
        if self.tools:
            fields["tools"] = [_tool(tool) for tool in self.tools]
        return fields | self._choice() | self._thinking()

    def _choice(self) -> dict[str, Any]:
        if self.tool_choice is None:
            return {}
        kind = self.tool_choice.get("type")
        if kind == "tool":
            choice: Any = {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        elif isinstance(kind, str) and kind in _CHOICES:
            choice = _CHOICES[kind]
        else:
            raise RequestError('tool_choice.type must be "auto", "any", "tool" or "none"')
        parallel = self.tool_choice.get("disable_parallel_tool_use") is not True
        return {"tool_choice": choice, "parallel_tool_calls": parallel}

    def _thinking(self) -> dict[str, Any]:
        """Templates call the switch either way."""
        if self.thinking is None:
            return {}
        kind = self.thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise RequestError('thinking.type must be "enabled", "disabled" or "adaptive"')
        wanted = kind != "disabled"
        budget = self.thinking.get("budget_tokens") if wanted else None
        switches = {"chat_template_kwargs": {"enable_thinking": wanted, "thinking": wanted}}
        return switches if budget is None else {**switches, "thinking_budget": budget}


class MessagesBody(PromptBody):
    max_tokens: int
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    ignore_eos: bool | None = None  # SGLang's

    def chat_fields(self) -> dict[str, Any]:
        own = self.model_dump(include={"max_tokens", "stream", "temperature", "top_p", "top_k", "ignore_eos"})
        # The message's id is the request's, so that /abort_request takes it.
        return super().chat_fields() | own | {"stop": self.stop_sequences, "rid": f"msg_{new_rid()}"}


def chat_body(body: PromptBody) -> ChatBody:
    return validated(ChatBody, body.chat_fields())


def _text(content: Any, where: str, between: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for block in content if isinstance(content, list) else [None]:
        kind, text = (block.get("type"), block.get("text")) if isinstance(block, dict) else (None, None)
        if kind in _MEDIA:
            raise RequestError(refused_part(where, kind))
        if kind != "text" or not isinstance(text, str):
            raise RequestError(f"{where} must be a string or a list of text blocks")
        texts.append(text)
    return between.join(texts)


def _messages(message: Block) -> list[Block]:
    """Results of tools are messages of their own, before what else the user says."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise RequestError(f"a message's role must be user or assistant; got {role!r}")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise RequestError(f"the content of a {role} message must be a string or a list of blocks")
    results: list[Block] = []
    rest: Block = {"role": role, "content": ""}
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            rest["content"] += block["text"]
        elif kind == "tool_result" and role == "user":
            text = _text(block.get("content") or "", "the content of a tool_result", "\n")
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        elif kind == "tool_use" and role == "assistant":
            rest.setdefault("tool_calls", []).append(_call(block))
        elif kind == "thinking" and role == "assistant":
            rest["reasoning_content"] = rest.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind in _MEDIA:
            raise RequestError(refused_part(f"the content of a {role} message", kind))
        elif kind != "redacted_thinking" or role != "assistant":
            raise RequestError(f"a content block of type {kind!r} is not supported in a {role} message")
    says = rest["content"] or role == "assistant" or not results
    return [*results, rest] if says else results


def _call(block: Block) -> Block:
    arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
    function = {"name": block.get("name"), "arguments": arguments}
    return {"id": block.get("id"), "type": "function", "function": function}


def _tool(tool: Block) -> Block:
    if tool.get("type", "custom") != "custom":
        raise RequestError(f"a tool of type {tool['type']!r} is not supported: only custom tools are")
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
    if isinstance(tool.get("description"), str):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
