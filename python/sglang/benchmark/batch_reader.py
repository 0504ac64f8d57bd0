"""Reading the stream of one request with several prompts, whose events are told apart by their index."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sglang.benchmark.outcome import Outcome
from sglang.benchmark.stream_readers import NativeReader, StreamError, error_text, number_after

_INDEX: Final = b'"index":'


class BatchReader:
    """POST /generate with a list of prompts."""

    def __init__(self, started: float, size: int) -> None:
        self.started = started
        self._readers = [NativeReader(started) for _ in range(size)]
        self._last = [started] * size  # when each prompt's last event came

    def feed(self, now: float, data: bytes) -> None:
        """
        Raises:
            StreamError: the event is an error.
        """
        index = 0 if len(self._readers) == 1 else number_after(_INDEX, data)
        if index is None:
            raise StreamError(error_text(data))
        self._readers[index].feed(now, data)
        self._last[index] = now

    def outcomes(self) -> list[Outcome]:
        """One a prompt; a prompt's ends with its own last event.

        Raises:
            StreamError: the stream ended before all prompts were finished.
        """
        return [reader.outcome(ended) for reader, ended in zip(self._readers, self._last, strict=True)]

    def whole(self, now: float, data: bytes) -> None:
        """A batch always streams."""
        raise StreamError(f"the server answered without a stream: {error_text(data)}")

    def outcome(self, ended: float) -> Outcome:
        """That of the whole request: what it failed with, or the first prompt's until all have ended."""
        return replace(self.outcomes()[0], latency=ended - self.started)
