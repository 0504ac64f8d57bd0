"""What a model thinks, apart from what it answers: <think>...</think>answer"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import regex

from sglang.srt.function_call import harmony
from sglang.srt.function_call.events import Text
from sglang.srt.utils.text_source import PieceParser, TextSource, Wait


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


ReplyPart = Reasoning | Text
_Source = TextSource[ReplyPart]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    begin: str = "<think>"
    end: str = "</think>"
    always: bool = False  # the model thinks first, also where the prompt does not say so
    special_tokens: bool = False  # whether the marks are special tokens, which a reply's text lacks else
    channels: bool = False  # a reply is messages for channels, and one of them is the reasoning's

    def is_open(self, prompt: str) -> bool:
        """Whether a reply to ``prompt`` begins inside the reasoning."""
        tail = prompt.rstrip()
        return tail.endswith(self.begin) or (self.always and not tail.endswith(self.end))

    def parser(self, is_open: bool, closers: tuple[str, ...] = ()) -> PieceParser[ReplyPart]:
        """``closers``: what ends a reasoning without being part of it, as the begin of a tool call."""

        def run(source: _Source) -> Iterator[None]:
            return _read_channels(source) if self.channels else _read(self, source, is_open, closers)

        return PieceParser(run)


REASONING_FORMATS: Final[dict[str, ReasoningFormat]] = {
    "deepseek-r1": ReasoningFormat(always=True),
    "deepseek-v3": ReasoningFormat(),
    "glm45": ReasoningFormat(),
    "gpt-oss": ReasoningFormat(harmony.BEGIN, harmony.END, special_tokens=True, channels=True),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "kimi_k2": ReasoningFormat(),
    "qwen3": ReasoningFormat(),
    "qwen3-thinking": ReasoningFormat(always=True),
}


def _read(form: ReasoningFormat, source: _Source, is_open: bool, closers: tuple[str, ...]) -> Wait[None]:
    # Only at the beginning: further on the words may be what the answer is about.
    begin = yield from source.match(regex.compile(rf"\s{{0,256}}{regex.escape(form.begin)}"))
    if begin is not None or is_open:
        yield from _read_reasoning(form, source, closers)
    yield from source.stream_rest(_giver(source, Text))


def _read_reasoning(form: ReasoningFormat, source: _Source, closers: tuple[str, ...]) -> Wait[None]:
    """Blanks at its ends are no part of it, nor are those between it and the answer."""
    yield from source.skip_blanks()
    blank = ""

    def give(text: str) -> None:
        nonlocal blank
        text = blank + text
        certain = text.rstrip()
        blank = text[len(certain) :]
        _giver(source, Reasoning)(certain)

    marker = yield from source.stream_until(give, form.end, *closers)
    if marker == form.end:
        source.take(len(marker))
        yield from source.skip_blanks()


def _read_channels(source: _Source) -> Wait[None]:
    """Calls are left as they are, for a parser of calls."""
    say, think = _giver(source, Text), _giver(source, Reasoning)
    while not source.ended or source.text:
        header = yield from harmony.read_header(source)
        if header is None:
            yield from harmony.read_plain(source, say)
        elif header.recipient is None:
            yield from harmony.read_body(source, think if header.channel == "analysis" else say)
        else:
            say(harmony.call_mark(header))
            yield from harmony.read_body(source, say)
            say(harmony.CALL_END)


def _giver(source: _Source, kind: type[Reasoning] | type[Text]) -> Callable[[str], None]:
    return lambda text: source.emit(kind(text)) if text else None
