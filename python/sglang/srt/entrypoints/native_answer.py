"""Answers of POST /generate and of ``Engine.generate``: {text, output_ids, meta_info}."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import msgspec

from sglang.srt.entrypoints.answering import encoded_event, raise_if_failed
from sglang.srt.entrypoints.meta_info import meta_info
from sglang.srt.entrypoints.native_request import NativeCall
from sglang.srt.entrypoints.repeated_parts import RepeatedParts
from sglang.srt.managers.text_request import Delta, Group, Sample, TextRequest


class NativeAnswers:
    """How answers to one call look."""

    def __init__(self, call: NativeCall, weight_version: str, incremental: bool) -> None:
        self._call = call
        self._weight_version = weight_version
        self._is_incremental = incremental

    def whole(self, samples: list[Sample], encoded: bool = False) -> dict[str, Any] | list[dict[str, Any]]:
        """``encoded``: what is large is JSON already."""
        answers = [
            self._answer(i, sample, sample.text, sample.output_ids[:], encoded=encoded)
            for i, sample in enumerate(samples)
        ]
        return answers if self._call.answers_with_list else answers[0]

    async def json(self, samples: list[Sample]) -> bytes:
        def encode() -> bytes:
            return msgspec.json.encode(self.whole(samples, encoded=True))

        return await asyncio.to_thread(encode) if any(map(_is_large, samples)) else encode()

    async def stream(self, group: Group) -> AsyncIterator[dict[str, Any]]:
        """
        Raises:
            RequestError: a sample has failed.
        """
        async for index, sample, delta in group.updates():
            raise_if_failed(sample)
            yield self._chunk(index, sample, delta)

    async def events(self, group: Group) -> AsyncIterator[dict[str, Any]]:
        """As ``stream``, to be encoded: what is large, or repeated by events, is encoded already.

        Raises:
            RequestError: a sample has failed.
        """
        repeated = [RepeatedParts() for _ in group.samples]
        async for index, sample, delta in group.updates():
            raise_if_failed(sample)
            if sample.finish is not None and _is_large(sample):
                yield await asyncio.to_thread(self.event, index, sample, delta, repeated[index])
            else:
                yield self.event(index, sample, delta, repeated[index])

    def event(self, index: int, sample: Sample, delta: Delta, parts: RepeatedParts) -> dict[str, Any]:
        """``parts``: what earlier events have had."""
        if self._is_incremental:
            return self._answer(index, sample, delta.text, delta.ids, delta.begin, True)
        parts.add(delta.text, delta.ids)
        return self._answer(index, sample, parts.text, parts.ids, 0, True)

    def _chunk(self, index: int, sample: Sample, delta: Delta) -> dict[str, Any]:
        if self._is_incremental:
            return self._answer(index, sample, delta.text, delta.ids, delta.begin)
        return self._answer(index, sample, sample.text, sample.output_ids[:])

    def _answer(
        self, index: int, sample: Sample, text: Any, ids: Any, begin: int = 0, encoded: bool = False
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "text": text,
            "output_ids": ids,
            "meta_info": meta_info(sample, self._weight_version, begin, encoded),
        }
        if self._call.answers_with_list:
            answer["index"] = index
        if self._call.return_prompt_token_ids:
            answer["prompt_token_ids"] = sample.prompt_ids
        return answer


class NativeFeed:
    """As ``events``, of samples that aren't large."""

    def __init__(self, answers: NativeAnswers, group: Group) -> None:
        self.has_ended = False
        self._answers = answers
        self._group = group
        self._repeated = [RepeatedParts() for _ in group.samples]

    def look(self) -> Iterator[bytes]:
        """
        Raises:
            RequestError: a sample has failed.
        """
        self.has_ended = self._group.is_finished
        for index, sample, delta in self._group.news():
            raise_if_failed(sample)
            yield encoded_event(self._answers.event(index, sample, delta, self._repeated[index]))


def may_be_large(requests: Sequence[TextRequest]) -> bool:
    """Whether there may be samples whose last event is better encoded by a thread."""
    return any(request.wish is not None and request.wish.hidden_states == "all" for request in requests)


def _is_large(sample: Sample) -> bool:
    """So that encoding it takes long enough to keep everybody else waiting."""
    return sample.told is not None and sample.told.has_all_hidden_states
