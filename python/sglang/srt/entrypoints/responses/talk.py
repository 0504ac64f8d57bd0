"""Items of OpenAI's responses (what was said, thought, called and answered) as messages of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from sglang.srt.entrypoints.text_only import refused_part
from sglang.srt.managers.text_request import RequestError

Item = dict[str, Any]
_TEXT_PARTS: Final = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_ROLES: Final = ("user", "assistant", "system", "developer")


def talk_messages(items: Sequence[Item]) -> list[dict[str, Any]]:
    """What the model thought, said and called in one turn is one message.

    Raises:
        RequestError: an item is of a kind that isn't served.
    """
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        _add(messages, item, f"input[{number}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message" and item.get("role") in _ROLES:
        text = _text(item.get("content"), f"{where}.content")
        if item["role"] == "assistant":
            _turn(messages, before=("content", "tool_calls"))["content"] = text
        else:
            messages.append({"role": item["role"], "content": text})
    elif kind == "message":
        raise RequestError(f"{where}.role must be one of {', '.join(_ROLES)}; got {item.get('role')!r}")
    elif kind == "reasoning":
        text = _text(item.get("content") or item.get("summary") or [], f"{where}.content")
        turn = _turn(messages, before=("reasoning_content", "content", "tool_calls"))
        turn["reasoning_content"] = text
    elif kind == "function_call":
        function = {"name": _string(item, "name", where), "arguments": _string(item, "arguments", where)}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        _turn(messages, before=()).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        text = _text(item.get("output"), f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": _string(item, "call_id", where), "content": text})
    else:
        raise RequestError(f"{where} is of type {kind!r}, which is not supported by this server")


def _turn(messages: list[dict[str, Any]], before: tuple[str, ...]) -> dict[str, Any]:
    """The assistant's last message; a new one where that has what must not come ``before``."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(name) for name in before):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    texts: list[str] = []
    for part in content if isinstance(content, list) else [None]:
        if not isinstance(part, dict):
            raise RequestError(f"{where} must be a string or a list of parts")
        kind = part.get("type")
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise RequestError(refused_part(where, kind))
        texts.append(part["text"])
    return "".join(texts)


def _string(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name} must be a string")
    return value
