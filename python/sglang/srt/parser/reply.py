"""A reply taken apart: what the model thought, what it says, what it calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace

from sglang.srt.function_call.events import CallArguments, CallStart, Text
from sglang.srt.function_call.registry import ToolFormat
from sglang.srt.function_call.tools import Tools
from sglang.srt.parser.reasoning import Reasoning, ReasoningFormat

ReplyEvent = Reasoning | Text | CallStart | CallArguments


@dataclass(frozen=True, slots=True)
class ReplyFormat:
    """How the replies to one request are read. Without formats a reply is text."""

    reasoning: ReasoningFormat | None = None
    reasoning_is_open: bool = False  # a reply begins inside the reasoning
    stream_reasoning: bool = True  # else it comes in one piece
    tool_format: ToolFormat | None = None
    tools: Tools = Tools({})
    parallel_calls: bool = True  # else those after the first are left out

    def parser(self) -> ReplyParser:
        return ReplyParser(self)


class ReplyParser:
    """One reply. Joined, the events are the same however its text is cut into pieces."""

    def __init__(self, form: ReplyFormat) -> None:
        self._form = form
        tool_format, reasoning = form.tool_format, form.reasoning
        closers = () if tool_format is None else tool_format.begins
        self._reasoning = None if reasoning is None else reasoning.parser(form.reasoning_is_open, closers)
        self._tools = None if tool_format is None else tool_format.parser(form.tools)
        self._is_text = self._reasoning is None and self._tools is None  # and nothing else
        self._held: list[Reasoning] = []
        self.num_calls = 0

    def push(self, text: str) -> list[ReplyEvent]:
        if self._is_text:
            return [Text(text)] if text else []
        parts = [Text(text)] if self._reasoning is None else self._reasoning.push(text)
        return self._pass_on(parts)

    def finish(self) -> list[ReplyEvent]:
        parts = [] if self._reasoning is None else self._reasoning.finish()
        events = self._pass_on(parts)
        last: list[ReplyEvent] = [] if self._tools is None else [*self._chosen(self._tools.finish())]
        held, self._held = self._held, []
        return _joined([*held, *events, *last])

    def _pass_on(self, parts: Iterable[Reasoning | Text]) -> list[ReplyEvent]:
        events: list[ReplyEvent] = []
        for part in parts:
            if isinstance(part, Reasoning):
                (events if self._form.stream_reasoning else self._held).append(part)
                continue
            events += self._held
            self._held = []
            events += [part] if self._tools is None else self._chosen(self._tools.push(part.text))
        return _joined(events)

    def _chosen(self, events: Iterable[Text | CallStart | CallArguments]) -> Iterable[ReplyEvent]:
        for event in events:
            if isinstance(event, CallStart):
                self.num_calls += 1
                event = event if event.id else replace(event, id=f"call_{uuid.uuid4().hex[:24]}")
            if isinstance(event, Text) or self.num_calls == 1 or self._form.parallel_calls:
                yield event


def _joined(events: list[ReplyEvent]) -> list[ReplyEvent]:
    """Neighbours of one kind as one; empty ones left out."""
    joined: list[ReplyEvent] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart) or type(last) is not type(event):
            joined.append(event)
        else:
            joined[-1] = replace(last, text=last.text + event.text)  # type: ignore[union-attr,type-var]
    return [event for event in joined if isinstance(event, CallStart) or event.text]
