"""Reading answers while they stream: SGLang's own events, and OpenAI's chunks.

A reader gets the JSON of each event with the moment it came, and makes the outcome when the stream ends.
The client may follow a thousand streams, so an event costs as little as it can.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Protocol

from sglang.benchmark.outcome import Outcome, TokenTimes

_COUNT: Final = b'"completion_tokens":'
_NUMBER: Final = re.compile(rb"\s*(\d+)")


class StreamError(RuntimeError):
    """The server ended a stream with an error, or too early."""


class Reader(Protocol):
    @property
    def started(self) -> float: ...

    def feed(self, now: float, data: bytes) -> None: ...

    def whole(self, now: float, data: bytes) -> None: ...

    def outcome(self, ended: float) -> Outcome: ...


class NativeReader:
    """POST /generate: an event has all text so far or, where the server is set so, what is new."""

    def __init__(self, started: float) -> None:
        self.started = started  # time.perf_counter() when the request was sent
        self._times = TokenTimes(started)
        self._first: dict[str, Any] | None = None
        self._cumulative: bool | None = None  # not known before the second event
        self._last = b""
        self._pieces: list[str] = []

    def feed(self, now: float, data: bytes) -> None:
        """
        Raises:
            StreamError: the event is an error.
        """
        count = number_after(_COUNT, data)
        if count is None:
            raise StreamError(error_text(data))
        self._times.reach(now, count)
        self._last = data
        if self._first is None:
            self._first = json.loads(data)
        elif self._cumulative is None:
            self._cumulative = _is_cumulative(self._first, json.loads(data))
        if not self._cumulative:
            self._pieces.append(json.loads(data)["text"])

    def whole(self, now: float, data: bytes) -> None:
        """An answer that did not stream."""
        self.feed(now, data)

    def outcome(self, ended: float) -> Outcome:
        """
        Raises:
            StreamError: the stream ended before the request did, or the server gave the request up.
        """
        last = json.loads(self._last) if self._last else {}
        meta = last.get("meta_info", {})
        reason = meta.get("finish_reason")
        if not reason:
            raise StreamError("the stream ended before the request was finished")
        if reason.get("type") == "abort":
            raise StreamError(f"the server gave the request up: {reason.get('message')}")
        times, whole = self._times, self._cumulative or self._cumulative is None
        return Outcome(
            times.started,
            ended - times.started,
            times.ttft(ended),
            tuple(times.itl),
            last["text"] if whole else "".join(self._pieces),
            int(meta.get("prompt_tokens", 0)),
            times.count,
            meta.get("cached_tokens"),
            str(reason.get("type", "")),
        )


def number_after(key: bytes, data: bytes) -> int | None:
    """The number behind the last ``key`` of a JSON text, without parsing it; None where there is none.

    ``key`` has its quotes and colon, so it is never part of a string: there the quotes are escaped.
    """
    place = data.rfind(key)
    found = _NUMBER.match(data, place + len(key)) if place >= 0 else None
    return int(found[1]) if found else None


def _is_cumulative(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Whether a stream's second event holds what the first one held."""
    if "output_ids" not in second:
        return bool(second["text"].startswith(first["text"]))
    return len(second["output_ids"]) >= second["meta_info"]["completion_tokens"]


class OpenAIReader:
    """/v1/completions and /v1/chat/completions. Tokens are counted by usage; without it a chunk is one."""

    def __init__(self, started: float) -> None:
        self.started = started  # time.perf_counter() when the request was sent
        self._times = TokenTimes(started)
        self._pieces: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish = ""

    def feed(self, now: float, data: bytes) -> None:
        """
        Raises:
            StreamError: the chunk is an error.
        """
        chunk = json.loads(data)
        if "choices" not in chunk:
            raise StreamError(error_text(data))
        text = "".join(map(self._choice_text, chunk["choices"]))
        usage = chunk.get("usage")
        if usage:
            self._usage = usage
        if text:
            self._pieces.append(text)
        if chunk["choices"]:
            self._times.reach(now, self._count(usage, bool(text)))

    def _count(self, usage: dict[str, Any] | None, has_text: bool) -> int:
        if usage and usage.get("completion_tokens") is not None:
            return int(usage["completion_tokens"])
        return self._times.count + has_text

    def _choice_text(self, choice: dict[str, Any]) -> str:
        self._finish = choice.get("finish_reason") or self._finish
        said = choice.get("delta") or choice.get("message") or choice
        reasoning = said.get("reasoning_content") or said.get("reasoning") or ""
        return reasoning + (said.get("content") or said.get("text") or "")

    def whole(self, now: float, data: bytes) -> None:
        """An answer that did not stream."""
        self.feed(now, data)

    def outcome(self, ended: float) -> Outcome:
        """
        Raises:
            StreamError: nothing came.
        """
        if not self._finish and not self._pieces:
            raise StreamError("the stream ended before the request was finished")
        times, usage = self._times, self._usage
        details = usage.get("prompt_tokens_details") or {}
        return Outcome(
            times.started,
            ended - times.started,
            times.ttft(ended),
            tuple(times.itl),
            "".join(self._pieces),
            int(usage.get("prompt_tokens") or 0),
            int(usage.get("completion_tokens") or times.count),
            details.get("cached_tokens"),
            self._finish,
        )


def error_text(data: bytes) -> str:
    """What an error body says, whatever shape it has."""
    try:
        body = json.loads(data)
    except ValueError:
        return data.decode("utf-8", "replace")[:300] or "an empty answer"
    found = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return str(found)[:300]
