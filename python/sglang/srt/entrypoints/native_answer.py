"""Answers of POST /generate and of ``Engine.generate``: {text, output_ids, meta_info}."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from sglang.srt.entrypoints.answering import raise_if_failed
from sglang.srt.entrypoints.meta_info import meta_info
from sglang.srt.entrypoints.native_request import NativeCall
from sglang.srt.entrypoints.repeated_parts import RepeatedParts
from sglang.srt.managers.text_request import Delta, Group, Sample


class NativeAnswers:
    """How answers to one call look."""

    def __init__(self, call: NativeCall, weight_version: str, incremental: bool) -> None:
        self._call = call
        self._weight_version = weight_version
        self._incremental = incremental

    def whole(self, samples: list[Sample]) -> dict[str, Any] | list[dict[str, Any]]:
        answers = [
            self._answer(i, sample, sample.text, sample.output_ids) for i, sample in enumerate(samples)
        ]
        return answers if self._call.answers_with_list else answers[0]

    async def stream(self, group: Group) -> AsyncIterator[dict[str, Any]]:
        """
        Raises:
            RequestError: a sample has failed.
        """
        async for index, sample, delta in group.updates():
            raise_if_failed(sample)
            yield self._chunk(index, sample, delta)

    async def events(self, group: Group) -> AsyncIterator[dict[str, Any]]:
        """As ``stream``, to be encoded: what events repeat is encoded already.

        Raises:
            RequestError: a sample has failed.
        """
        if self._incremental:
            async for chunk in self.stream(group):
                yield chunk
            return
        repeated = [RepeatedParts() for _ in group.samples]
        async for index, sample, delta in group.updates():
            raise_if_failed(sample)
            parts = repeated[index]
            parts.add(delta.text, delta.ids)
            yield {**self._answer(index, sample, "", []), "text": parts.text, "output_ids": parts.ids}

    def _chunk(self, index: int, sample: Sample, delta: Delta) -> dict[str, Any]:
        if self._incremental:
            return self._answer(index, sample, delta.text, delta.ids, delta.begin)
        return self._answer(index, sample, sample.text, sample.output_ids)

    def _answer(
        self, index: int, sample: Sample, text: str, ids: list[int], begin: int = 0
    ) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "text": text,
            "output_ids": list(ids),
            "meta_info": meta_info(sample, self._weight_version, begin),
        }
        if self._call.answers_with_list:
            answer["index"] = index
        if self._call.return_prompt_token_ids:
            answer["prompt_token_ids"] = sample.prompt_ids
        return answer
