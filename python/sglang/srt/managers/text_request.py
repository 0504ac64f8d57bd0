"""A request on the text side: what a client asked for, and how far the answer is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import NamedTuple

from sglang.srt.managers.io_struct import FinishReason, RequestStats, RequestWish, TextOutput
from sglang.srt.managers.text_reports import TextReport
from sglang.srt.sampling.sampling_params import ReasoningEnd, SamplingParams


class RequestError(ValueError):
    """A request that can't be served; always answered with ``status_code`` and the message."""

    def __init__(self, message: str, status_code: int = 400, code: str | None = None) -> None:
        """``code``: a word for programs, where there is one."""
        super().__init__(message)
        self.status_code = status_code
        self.code = code


@dataclass(frozen=True, slots=True)
class TextRequest:
    """One prompt with its parameters; ``sampling.n`` of it makes that many samples."""

    prompt: str | list[int]
    sampling: SamplingParams
    rid: str | None = None
    stream: bool = False
    add_special_tokens: bool = True  # to a prompt that is text
    log_metrics: bool = True
    call_rid: str | None = None  # of the call, where that has several prompts and an id of its own
    reasoning_end: ReasoningEnd | None = None  # where a grammar begins; None: at once
    thinking: ReasoningEnd | None = None  # the part that a thinking budget is about
    wish: RequestWish | None = None  # what to tell beside the text
    logprob_texts: bool = False  # with each id's text
    processor: str | None = None  # custom logit processor, as clients send it
    cache_salt: str = ""
    priority: int | None = None  # as the client says it
    no_logs: bool = False  # nothing of it goes into a log or a file
    labels: tuple[str, ...] = ()  # values of its own labels of metrics, in the order of their names


class Delta(NamedTuple):
    """What came since the last look at a sample."""

    text: str
    ids: list[int]
    begin: int = 0  # how many ids came before


class Bell:
    """As an event of asyncio, for one that waits and without what several would need: it is rung for every
    token of every stream.
    """

    __slots__ = ("_waiter", "is_set", "listener")

    def __init__(self) -> None:
        self.is_set = False
        self.listener: Callable[[], None] | None = None  # is told in place of one that waits
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        if not self.is_set:
            self.is_set = True
            if self.listener is not None:
                self.listener()
            elif self._waiter is not None and not self._waiter.done():
                self._waiter.set_result(None)

    def clear(self) -> None:
        self.is_set = False

    async def wait(self) -> None:
        if self.is_set:
            return
        assert self._waiter is None, "two wait"
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Sample:
    """One answer in the making. Written by the tokenizer manager, read by an endpoint."""

    def __init__(
        self,
        rid: str,
        request: TextRequest,
        prompt_ids: list[int],
        changed: Bell,
        told: TextReport | None = None,
    ) -> None:
        self.rid = rid
        self.request = request
        self.prompt_ids = prompt_ids
        self.created_ts = time.time()
        self.finished_ts: float | None = None
        self.last_output_ts: float | None = None
        self.text = ""
        self.output_ids: list[int] = []
        self.stats = RequestStats(len(prompt_ids), 0, 0)
        self.finish: FinishReason | None = None
        self.told = told  # beside the text
        self._changed = changed
        self._seen_text = 0
        self._seen_ids = 0
        self._seen_finish = False

    def update(self, output: TextOutput, now: float) -> None:
        self.text += output.new_text
        self.output_ids.extend(output.new_ids)
        self.stats = output.stats
        if self.told is not None and output.report is not None:
            self.told.add(output.report, output.new_ids)
        self.end(output.finish, now)

    def end(self, finish: FinishReason | None, now: float) -> None:
        if finish is not None:
            self.finish = finish
            self.finished_ts = now
        self._changed.set()

    @property
    def has_failed(self) -> bool:
        """An abort with a status code is an error; one that the client asked for is an answer."""
        finish = self.finish
        return finish is not None and finish.type == "abort" and finish.status_code is not None

    def take_delta(self) -> Delta | None:
        """What is new since the last call; None if nothing is."""
        ended = self.finish is not None
        if len(self.output_ids) == self._seen_ids and ended == self._seen_finish:
            return None
        delta = Delta(self.text[self._seen_text :], self.output_ids[self._seen_ids :], self._seen_ids)
        self._seen_text, self._seen_ids = len(self.text), len(self.output_ids)
        self._seen_finish = ended
        return delta


class Group:
    """The samples of one HTTP request, in the order of the prompts and then of ``n``."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.changed = Bell()

    @property
    def is_finished(self) -> bool:
        return None not in [sample.finish for sample in self.samples]

    async def finished(self) -> list[Sample]:
        """All samples, as soon as all have ended or one has failed."""
        while not self.is_finished and not any(sample.has_failed for sample in self.samples):
            self.changed.clear()
            await self.changed.wait()
        return self.samples

    async def updates(self) -> AsyncIterator[tuple[int, Sample, Delta]]:
        """Each sample's news as they come, with its index; ends when all samples have ended."""
        while True:
            self.changed.clear()
            ended = self.is_finished
            for news in self.news():
                yield news
            if ended:
                return
            await self.changed.wait()

    def news(self) -> list[tuple[int, Sample, Delta]]:
        """Of the samples that have any, with their indices."""
        made = []
        for index, sample in enumerate(self.samples):
            delta = sample.take_delta()
            if delta is not None:
                made.append((index, sample, delta))
        return made
