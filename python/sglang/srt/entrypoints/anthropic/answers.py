"""Replies in Anthropic's shape, whole and as typed events."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from sglang.srt.entrypoints.answering import StreamForm, raise_if_failed
from sglang.srt.entrypoints.error_shapes import anthropic_error
from sglang.srt.function_call.events import CallArguments, CallStart, Text
from sglang.srt.managers.text_request import Group, RequestError, Sample
from sglang.srt.parser.reasoning import Reasoning
from sglang.srt.parser.reply import ReplyEvent, ReplyFormat, ReplyParser


def _encode(event: dict[str, Any]) -> bytes:
    return f"event: {event['type']}\ndata: ".encode() + msgspec.json.encode(event) + b"\n\n"


STREAM_FORM = StreamForm(_encode, anthropic_error, b"")


def envelope(rid: str, model: str) -> dict[str, Any]:
    return {"id": rid, "type": "message", "role": "assistant", "model": model, "content": []}


def usage(sample: Sample) -> dict[str, int]:
    """What came from the cache is no part of ``input_tokens``."""
    stats = sample.stats
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.completion_tokens,
    }


def ending(sample: Sample, parser: ReplyParser) -> dict[str, Any]:
    """
    Raises:
        RequestError: somebody has aborted it: there is no reason for that here.
    """
    finish = sample.finish
    assert finish is not None
    if finish.type == "abort":
        raise RequestError(finish.message or "the request was aborted", 500)
    matched = finish.matched if isinstance(finish.matched, str) else None
    reason = "max_tokens" if finish.type == "length" else "end_turn" if matched is None else "stop_sequence"
    if parser.num_calls and reason == "end_turn":
        reason = "tool_use"
    return {"stop_reason": reason, "stop_sequence": matched}


def whole(rid: str, model: str, sample: Sample, form: ReplyFormat) -> dict[str, Any]:
    parser = form.parser()
    content: list[dict[str, Any]] = []
    for event in [*parser.push(sample.text), *parser.finish()]:
        if isinstance(event, CallArguments):
            content[-1]["input"] += event.text
            continue
        block, name = _opened(event), _field(event)
        if not isinstance(event, CallStart):
            block[name] = event.text
        content.append(block | ({"input": ""} if isinstance(event, CallStart) else {}))
    for block in content:
        if block["type"] == "tool_use":
            block["input"] = _arguments(block["input"])
    return {**envelope(rid, model), "content": content, **ending(sample, parser), "usage": usage(sample)}


def _arguments(text: str) -> Any:
    """Of a call that was cut off, nothing: half an object is none."""
    try:
        return json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}


def _opened(event: ReplyEvent) -> dict[str, Any]:
    if isinstance(event, CallStart):
        return {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
    if isinstance(event, Reasoning):
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "text", "text": ""}


def _field(event: ReplyEvent) -> str:
    return "thinking" if isinstance(event, Reasoning) else "text"


async def events(rid: str, model: str, group: Group, form: ReplyFormat) -> AsyncIterator[dict[str, Any]]:
    """
    Raises:
        RequestError: the request has failed.
    """
    parser, blocks, started = form.parser(), _Blocks(), False
    async for _, sample, delta in group.updates():
        raise_if_failed(sample)
        if not started:
            started = True
            begun = {**envelope(rid, model), "stop_reason": None, "stop_sequence": None}
            yield {
                "type": "message_start",
                "message": {**begun, "usage": usage(sample) | {"output_tokens": 0}},
            }
        parts = parser.push(delta.text)
        if sample.finish is not None:
            parts += parser.finish()
        for part in parts:
            for event in blocks.of(part):
                yield event
        if sample.finish is not None:
            for event in blocks.close():
                yield event
            yield {"type": "message_delta", "delta": ending(sample, parser), "usage": usage(sample)}
            yield {"type": "message_stop"}


class _Blocks:
    """Blocks follow each other: the next begins where the last has stopped."""

    def __init__(self) -> None:
        self._index = -1
        self._open: type[ReplyEvent] | None = None

    def of(self, event: ReplyEvent) -> list[dict[str, Any]]:
        if isinstance(event, CallArguments):
            return [self._delta({"type": "input_json_delta", "partial_json": event.text})]
        made = []
        if isinstance(event, CallStart) or self._open is not type(event):
            made = self.close()
            self._index += 1
            self._open = type(event)
            start = {"type": "content_block_start", "index": self._index, "content_block": _opened(event)}
            made.append(start)
        if isinstance(event, Text | Reasoning):
            name = _field(event)
            made.append(self._delta({"type": f"{name}_delta", name: event.text}))
        return made

    def close(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}
