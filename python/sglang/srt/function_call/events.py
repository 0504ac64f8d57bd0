"""What a reply with tool calls is made of, in the order of its text."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.utils.text_source import TextSource


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str
    id: str | None = None  # where the model writes ids


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next part of the arguments, as JSON text, of the last call that has started."""

    text: str


ToolEvent = Text | CallStart | CallArguments
ToolSource = TextSource[ToolEvent]


class CallWriter:
    """Emits events. Blanks beside calls are dropped: they are the format's, and no part of the answer."""

    def __init__(self, source: ToolSource) -> None:
        self._source = source
        self._blank = ""
        self._follows_call = False

    def text(self, text: str) -> None:
        text = self._blank + text
        certain = text.rstrip()
        self._blank = text[len(certain) :]
        if certain:
            self._source.emit(Text(certain))
            self._follows_call = False

    def start(self, name: str, call_id: str | None = None) -> None:
        self._blank = ""
        self._follows_call = True
        self._source.emit(CallStart(name, call_id))

    def arguments(self, text: str) -> None:
        if text:
            self._source.emit(CallArguments(text))

    def end_of_text(self) -> None:
        if self._blank and not self._follows_call:
            self._source.emit(Text(self._blank))
        self._blank = ""
