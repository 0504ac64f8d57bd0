"""Choices of a chat completion, whole or as they come, from the events of a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.entrypoints.openai.answers import ending
from sglang.srt.entrypoints.openai.extras import Choice, TextOnly
from sglang.srt.entrypoints.openai.logprobs import chat_logprobs, hidden_state
from sglang.srt.function_call.events import CallArguments, CallStart, Text
from sglang.srt.managers.text_request import Delta, Sample
from sglang.srt.parser.reasoning import Reasoning
from sglang.srt.parser.reply import ReplyEvent, ReplyFormat, ReplyParser
from sglang.srt.utils.text_tokenizer import TextTokenizer


def whole_choice(index: int, sample: Sample, form: ReplyFormat, tokenizer: TextTokenizer) -> dict[str, Any]:
    parser = form.parser()
    events = [*parser.push(sample.text), *parser.finish()]
    text = "".join(event.text for event in events if isinstance(event, Text))
    thought = "".join(event.text for event in events if isinstance(event, Reasoning))
    calls = _whole_calls(events)
    message = {
        "role": "assistant",
        "content": text if text or not calls else None,
        "reasoning_content": thought or None,
        "tool_calls": calls or None,
    }
    logprobs = chat_logprobs(sample, 0, len(sample.output_ids), tokenizer)
    choice = {"index": index, "message": message, "logprobs": logprobs, **_ending(sample, parser)}
    return {**choice, **hidden_state(sample)}


def _whole_calls(events: Sequence[ReplyEvent]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, CallStart):
            calls.append(_call(event))
        elif isinstance(event, CallArguments):
            calls[-1]["function"]["arguments"] += event.text
    return calls


class StreamChoices:
    """Of all samples of a request: the role first, then what the reply is made of, then how it ended."""

    def __init__(self, form: ReplyFormat, tokenizer: TextTokenizer) -> None:
        self._form = form
        self._tokenizer = tokenizer
        self._num_told: dict[int, int] = {}  # ids whose logprobs were sent
        self._parsers: dict[int, ReplyParser] = {}
        self._num_calls: dict[int, int] = {}

    def choices(self, index: int, sample: Sample, delta: Delta) -> Sequence[Choice]:
        made = []
        parser = self._parsers.get(index)
        if parser is not None and sample.finish is None and sample.told is None:
            return [self._running(index, event) for event in parser.push(delta.text)]
        if parser is None:
            parser = self._parsers[index] = self._form.parser()
            self._num_calls[index] = 0
            made.append(_delta(index, {"role": "assistant", "content": ""}))
        events = parser.push(delta.text)
        if sample.finish is not None:
            events += parser.finish()
        parts = [_delta(index, self._part(index, event)) for event in events]
        if sample.finish is not None:
            if hidden := hidden_state(sample):
                parts.append(_delta(index, hidden))
            parts.append({**_delta(index, {}), **_ending(sample, parser)})
        if parts:
            parts[0]["logprobs"] = self._logprobs(index, sample)
        return made + parts

    def _running(self, index: int, event: ReplyEvent) -> Choice:
        if isinstance(event, Text):
            return TextOnly(index, _content, event.text)
        if isinstance(event, Reasoning):
            return TextOnly(index, _reasoning_content, event.text)
        return _delta(index, self._part(index, event))

    def _logprobs(self, index: int, sample: Sample) -> dict[str, Any] | None:
        """Of the ids that have come since those of an earlier choice; text that is held back has none yet."""
        begin, end = self._num_told.get(index, 0), len(sample.output_ids)
        self._num_told[index] = end
        return chat_logprobs(sample, begin, end, self._tokenizer) if begin < end else None

    def _part(self, index: int, event: ReplyEvent) -> dict[str, Any]:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, CallStart):
            self._num_calls[index] += 1
            part = _call(event)
        else:
            part = {"function": {"arguments": event.text}}
        return {"tool_calls": [{"index": self._num_calls[index] - 1, **part}]}


def _call(event: CallStart) -> dict[str, Any]:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}


def _ending(sample: Sample, parser: ReplyParser) -> dict[str, Any]:
    end = ending(sample)
    if parser.num_calls and end["finish_reason"] == "stop":
        return {**end, "finish_reason": "tool_calls"}
    return end


def _content(index: int, text: str) -> dict[str, Any]:
    return _delta(index, {"content": text})


def _reasoning_content(index: int, text: str) -> dict[str, Any]:
    return _delta(index, {"reasoning_content": text})


def _delta(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, "matched_stop": None}
