"""What a reply is made of as items of a response, and the events by which a stream tells of them."""

from __future__ import annotations

import uuid
from typing import Any

from sglang.srt.entrypoints.responses.talk import Item
from sglang.srt.function_call.events import CallArguments, CallStart, Text
from sglang.srt.parser.reasoning import Reasoning
from sglang.srt.parser.reply import ReplyEvent

Event = dict[str, Any]


class OutputItems:
    """Items follow each other: the next begins where the last is done."""

    def __init__(self) -> None:
        self._done: list[Item] = []
        self._open: Item | None = None
        self._kind: type[ReplyEvent] | None = None
        self._pieces: list[str] = []
        self._logprobs: list[Item] = []

    def items(self) -> list[Item]:
        """Of the one that is open, what there is of it."""
        return self._done if self._open is None else [*self._done, self._so_far(self._open)]

    def add(self, event: ReplyEvent, logprobs: list[Item]) -> list[Event]:
        """``logprobs``: of the tokens that ``event`` is made of, if it is text and they were asked for."""
        made: list[Event] = []
        if isinstance(event, CallStart) or (
            not isinstance(event, CallArguments) and self._kind is not type(event)
        ):
            made = [*self.close("completed"), *self._begin(event)]
        if not isinstance(event, CallStart):
            self._pieces.append(event.text)
            beside = {"logprobs": logprobs} if isinstance(event, Text) else {}
            self._logprobs += logprobs
            made.append(self._told(f"{_TEXTS[type(event)]}.delta", delta=event.text, **beside))
        return made

    def close(self, status: str) -> list[Event]:
        """The last one's end; nothing where none is open."""
        if self._open is None or self._kind is None:
            return []
        item, text = self._open, self._text()
        closed = self._so_far(item) | {"status": status}
        made: list[Event] = []
        if item["type"] == "function_call":
            arguments = {"arguments": text, "name": item["name"]}
            made.append(self._told("function_call_arguments.done", **arguments))
        else:
            beside = {"logprobs": self._logprobs} if self._kind is Text else {}
            made.append(self._told(f"{_TEXTS[self._kind]}.done", text=text, **beside))
            made.append(self._told("content_part.done", part=closed["content"][0]))
        index = len(self._done)
        self._done.append(closed)
        self._open, self._kind, self._pieces, self._logprobs = None, None, [], []
        return [*made, {"type": "response.output_item.done", "output_index": index, "item": closed}]

    def _begin(self, event: ReplyEvent) -> list[Event]:
        item = self._open = _new_item(event)
        self._kind = type(event)
        made: list[Event] = [
            {"type": "response.output_item.added", "output_index": len(self._done), "item": dict(item)}
        ]
        if item["type"] != "function_call":
            made.append(self._told("content_part.added", part=_part(item, "", [])))
        return made

    def _told(self, kind: str, **fields: Any) -> Event:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._done)}
        if self._open["type"] != "function_call":
            place["content_index"] = 0
        return {"type": f"response.{kind}", **place, **fields}

    def _so_far(self, item: Item) -> Item:
        if item["type"] == "function_call":
            return item | {"arguments": self._text()}
        return item | {"content": [_part(item, self._text(), list(self._logprobs))]}

    def _text(self) -> str:
        return "".join(self._pieces)


_TEXTS: dict[type[ReplyEvent], str] = {
    Text: "output_text",
    Reasoning: "reasoning_text",
    CallArguments: "function_call_arguments",
}


def _new_item(event: ReplyEvent) -> Item:
    number = uuid.uuid4().hex
    if isinstance(event, CallStart):
        names = {"call_id": event.id, "name": event.name, "arguments": ""}
        return {"id": f"fc_{number}", "type": "function_call", "status": "in_progress", **names}
    if isinstance(event, Reasoning):
        begun = {"status": "in_progress", "summary": [], "content": []}
        return {"id": f"rs_{number}", "type": "reasoning", **begun}
    said = {"status": "in_progress", "role": "assistant", "content": []}
    return {"id": f"msg_{number}", "type": "message", **said}


def _part(item: Item, text: str, logprobs: list[Item]) -> Item:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
