"""A body of OpenAI's responses as one of chat completions."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from pydantic import Field

from sglang.srt.entrypoints.bodies import Body, validated
from sglang.srt.entrypoints.openai.protocol import ChatBody
from sglang.srt.entrypoints.responses.talk import Item, talk_messages
from sglang.srt.managers.text_request import RequestError

_ECHOED: Final = (  # they change nothing of a reply: the response has them again
    "metadata", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "user", "max_tool_calls",
)  # fmt: skip
_PASSED: Final = (  # SGLang's: what chat completions have
    "bad_words", "cache_salt", "chat_template_kwargs", "custom_logit_processor", "custom_params", "extra_key",
    "frequency_penalty", "ignore_eos", "logit_bias", "min_p", "min_tokens", "presence_penalty", "priority",
    "repetition_penalty", "seed", "skip_special_tokens", "speculative_draft_len", "stop", "stop_regex",
    "stop_token_ids", "thinking_budget", "top_k",
)  # fmt: skip
# Ours has one value that means nothing more than the field's absence does.
_ONE_VALUE: Final[Mapping[str, tuple[Any, ...]]] = {
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}),
}
# OpenAI's own limits.
_Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
_LOGPROBS: Final = "message.output_text.logprobs"
_INCLUDABLE: Final = (_LOGPROBS, "reasoning.encrypted_content")  # reasoning comes as it is, and goes back so
_EFFORTS: Final = ("effort", "summary", "generate_summary")


class ResponsesBody(Body):
    model: str = ""
    input: str | Annotated[list[Item], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[Item], Field(fail_fast=True)] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    text: Item | None = None
    reasoning: Item | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    metadata: _Metadata | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    max_tool_calls: int | None = None

    def items(self) -> list[Item]:
        """Each with an id, by which the list of them is gone through."""
        said = self.input
        items = [{"role": "user", "content": said}] if isinstance(said, str) else said
        return [item if _has_id(item) else {**item, "id": _new_id(item)} for item in items]

    def echoed(self) -> Item:
        return {name: getattr(self, name) for name in _ECHOED}

    def refuse_unsupported(self) -> None:
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, values in _ONE_VALUE.items():
            if extra.get(name, values[0]) not in values:
                raise RequestError(f"{name} may only be {values[-1]!r} on this server, or left out")
        unknown = sorted(set(extra) - {*_PASSED, *_ONE_VALUE})
        if unknown:
            raise RequestError(f"{', '.join(unknown)}: not supported by this server; leave it out")
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise RequestError(
                    f"include may have {' and '.join(_INCLUDABLE)} on this server; got {name!r}"
                )
        if self.background and self.store is False:
            raise RequestError("background needs store: a response that is not kept can't be asked for")

    def chat_body(self, said: Sequence[Item], rid: str) -> ChatBody:
        """``said``: the items of the talk so far, these ones among them.

        Raises:
            RequestError: something is asked for that isn't served.
        """
        self.refuse_unsupported()
        extra = self.model_extra or {}
        messages = talk_messages(said)
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": bool(self.stream or self.background),
            "rid": rid,
            "response_format": _format(self.text or {}),
            "logprobs": bool(self.top_logprobs) or _LOGPROBS in (self.include or ()),
            "top_logprobs": self.top_logprobs,
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            **_effort(self.reasoning or {}),
            **self._tool_fields(),
            **{name: extra[name] for name in _PASSED if name in extra},
        }
        return validated(ChatBody, fields)

    def _tool_fields(self) -> dict[str, Any]:
        tools = [_tool(f"tools[{number}]", tool) for number, tool in enumerate(self.tools or [])]
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            names = _allowed(choice)
            tools = [tool for tool in tools if tool["function"].get("name") in names]
            choice = choice.get("mode", "auto")
        elif isinstance(choice, dict):
            if choice.get("type") != "function":
                raise RequestError(
                    f"tool_choice is of type {choice.get('type')!r}: only functions can be called here"
                )
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        return {"tools": tools or None, "tool_choice": choice}


def _has_id(item: Item) -> bool:
    return isinstance(item.get("id"), str) and bool(item["id"])


def _new_id(item: Item) -> str:
    prefixes = {"reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    return f"{prefixes.get(str(item.get('type')), 'msg')}_{uuid.uuid4().hex}"


def _tool(where: str, tool: Item) -> Item:
    kind = tool.get("type")
    if kind != "function":
        raise RequestError(f"{where} is of type {kind!r}, which this server does not run: only functions are")
    names = ("name", "description", "parameters")
    return {
        "type": "function",
        "function": {name: tool[name] for name in names if tool.get(name) is not None},
    }


def _allowed(choice: Item) -> list[str]:
    listed = choice.get("tools")
    tools = listed if isinstance(listed, list) else [None]
    names = [tool.get("name") if isinstance(tool, dict) else None for tool in tools]
    known = [name for name in names if isinstance(name, str)]
    if choice.get("mode", "auto") not in ("auto", "required") or len(known) < len(names):
        raise RequestError('tool_choice must have a mode, "auto" or "required", and tools with names')
    return known


def _format(text: Item) -> Any:
    """``text.format`` as chat completions have it."""
    unknown = sorted({*text} - {"format", "verbosity"})
    if unknown or text.get("verbosity") not in (None, "medium"):
        raise RequestError(f"text.{unknown[0] if unknown else 'verbosity'} is not supported: leave it out")
    form = text.get("format")
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        return form
    if not isinstance(form.get("schema"), dict | bool):
        raise RequestError(
            'text.format of type json_schema must have a name and a schema: {"type": "object", …}'
        )
    return {"type": "json_schema", "json_schema": {"name": form.get("name"), "schema": form["schema"]}}


def _effort(reasoning: Item) -> dict[str, Any]:
    """Summaries are not made: what the model thinks comes as it is."""
    unknown = sorted({*reasoning} - {*_EFFORTS})
    if unknown:
        raise RequestError(f"reasoning.{unknown[0]} is not supported by this server: leave it out")
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) not in (None, "auto"):
            raise RequestError(f'reasoning.{name} may only be "auto": no summaries are made here')
    effort = reasoning.get("effort")
    return {} if effort is None else {"reasoning_effort": effort}
