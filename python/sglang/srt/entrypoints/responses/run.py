"""One response, while it is made and after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from sglang.srt.entrypoints.answering import error_message, raise_if_failed
from sglang.srt.entrypoints.responses.items import Event, OutputItems
from sglang.srt.entrypoints.responses.talk import Item
from sglang.srt.function_call.events import Text
from sglang.srt.managers.text_request import Group, RequestError, Sample
from sglang.srt.parser.reasoning import Reasoning
from sglang.srt.parser.reply import ReplyEvent, ReplyFormat

logger = logging.getLogger(__name__)

_ENDINGS: Final = {"stop": "completed", "length": "incomplete", "abort": "cancelled"}
CONTINUABLE: Final = ("completed", "incomplete")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a response is to."""

    id: str
    given: Item  # fields of the response that say what was asked for
    talk: Sequence[Item]  # all items before the reply
    form: ReplyFormat
    count_reasoning: Callable[[Sample], int]
    logprobs: Callable[[Sample, int], list[Item]]  # of a reply's tokens from the given one on; none: no wish
    keeps_events: bool  # a stream that clients may come back to
    in_background: bool


class ResponseRun:
    """It comes about as ``events`` is walked through, by one who waits for it or by a task."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.status = "queued" if asked.in_background else "in_progress"
        self.kept: list[Event] = []
        self.changed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._items = OutputItems()
        self._created_ts = int(time.time())
        self._fields: Item = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        self._num_events = 0
        self._num_told = 0  # tokens whose log-probabilities were told, or have no place

    @property
    def has_ended(self) -> bool:
        return self.status not in ("queued", "in_progress")

    @property
    def talk(self) -> list[Item]:
        """With the reply: what the next response goes on from."""
        return [*self.asked.talk, *self._items.items()]

    def response(self) -> Item:
        return {
            "id": self.asked.id,
            "object": "response",
            "created_at": self._created_ts,
            "status": self.status,
            **self._fields,
            "output": list(self._items.items()),
            **self.asked.given,
        }

    def num_bytes(self) -> int:
        return len(msgspec.json.encode([self.response(), list(self.asked.talk), self.kept]))

    async def events(self, group: Group) -> AsyncIterator[Event]:
        """
        Raises:
            RequestError: the request has failed before anything came.
        """
        parser = self.asked.form.parser()
        async for _, sample, delta in group.updates():
            if self._num_events == 0:
                raise_if_failed(sample)
                for event in self._begin():
                    yield event
            parts = parser.push(delta.text)
            if sample.finish is not None:
                parts += parser.finish()
            for part in parts:
                for told in self._items.add(part, self._logprobs(sample, part)):
                    yield self._numbered(told)
            if sample.finish is not None:
                for told in self._end(sample):
                    yield told

    def _logprobs(self, sample: Sample, part: ReplyEvent) -> list[Item]:
        """Of the tokens that have come since the last part that was text; those of calls are left out."""
        begin, wished = self._num_told, sample.request.wish is not None
        if not wished or isinstance(part, Reasoning):
            return []
        self._num_told = len(sample.output_ids)
        if not isinstance(part, Text):
            return []
        return self.asked.logprobs(sample, max(begin, self.asked.count_reasoning(sample)))

    async def in_background(self, group: Group) -> None:
        try:
            async for event in self.events(group):
                self._keep(event)
        except RequestError as error:
            self._fail(error)
        except Exception as error:  # the task's edge: nobody else would hear of it
            logger.exception("Response %s failed.", self.asked.id)
            self._fail(RequestError(f"internal error: {type(error).__name__}: {error}", 500))

    def _fail(self, error: RequestError) -> None:
        for event in self._begin() if self._num_events == 0 else []:
            self._keep(event)
        self._keep(self._failed(error))

    def _keep(self, event: Event) -> None:
        """Whoever waits looks again; who waits after that waits for the next one."""
        if self.asked.keeps_events:
            self.kept.append(event)
        self.changed.set()
        self.changed = asyncio.Event()

    async def kept_events(self, after: int) -> AsyncIterator[Event]:
        """Those with a larger number than ``after``, as they come."""
        place = after + 1
        while True:
            changed = self.changed
            for event in self.kept[place:]:
                yield event
                place += 1
            if self.has_ended and place >= len(self.kept):
                return
            await changed.wait()

    def _begin(self) -> list[Event]:
        names = (
            ["created", "queued", "in_progress"] if self.asked.in_background else ["created", "in_progress"]
        )
        made = []
        for name in names:
            self.status = "in_progress" if name == "in_progress" else self.status
            made.append(self._about(name))
        return made

    def _end(self, sample: Sample) -> list[Event]:
        finish = sample.finish
        assert finish is not None
        self._fields["usage"] = self._usage(sample)
        status = "failed" if sample.has_failed else _ENDINGS[finish.type]
        closing = self._items.close("completed" if status == "completed" else "incomplete")
        made = [self._numbered(event) for event in closing]
        if status == "failed":
            return [*made, self._failed(_failure(sample))]
        if status == "incomplete":
            self._fields["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            self._fields["completed_at"] = int(time.time())
        self.status = status
        return [*made, self._about("completed" if status == "completed" else "incomplete")]

    def _failed(self, error: RequestError) -> Event:
        self.status = "failed"
        code = "server_error" if error.status_code >= 500 else "invalid_prompt"
        self._fields["error"] = {"code": code, "message": error_message(error)}
        return self._about("failed")

    def _about(self, name: str) -> Event:
        return self._numbered({"type": f"response.{name}", "response": self.response()})

    def _numbered(self, event: Event) -> Event:
        self._num_events += 1
        return {**event, "sequence_number": self._num_events - 1}

    def _usage(self, sample: Sample) -> Item:
        stats = sample.stats
        return {
            "input_tokens": stats.prompt_tokens,
            "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.asked.count_reasoning(sample)},
            "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        }


def _failure(sample: Sample) -> RequestError:
    assert sample.finish is not None and sample.finish.status_code is not None
    return RequestError(sample.finish.message or "the request was aborted", sample.finish.status_code)
