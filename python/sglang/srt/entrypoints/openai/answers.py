"""What chat and text completions have in common: usage, finish reasons, streams of several samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang.srt.entrypoints.answering import encoded_event, raise_if_failed
from sglang.srt.entrypoints.event_frame import EventFrame
from sglang.srt.entrypoints.openai.extras import Choice, Extras, MakeChoice, Shape, TextOnly, no_reasoning
from sglang.srt.entrypoints.openai.protocol import StreamOptions
from sglang.srt.managers.text_request import Group, Sample


def ending(sample: Sample) -> dict[str, Any]:
    """``finish_reason`` and ``matched_stop``; both None while it runs."""
    finish = sample.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.type, "matched_stop": finish.matched}


class ChunkFeed:
    """A chunk for each choice that ``make_choices`` makes of a sample's news, ``sglext`` and the usage at the
    end.
    """

    def __init__(
        self,
        envelope: dict[str, Any],
        group: Group,
        make_choices: MakeChoice,
        options: StreamOptions | None,
        extras: Extras,
        count_reasoning: Callable[[Sample], int] = no_reasoning,
    ) -> None:
        self.has_ended = False
        self._envelope = envelope
        self._group = group
        self._make = make_choices
        self._options = options or StreamOptions()
        self._extras = extras
        self._count_reasoning = count_reasoning
        self._frames: dict[tuple[int, Shape], EventFrame] = {}

    def look(self) -> Iterator[bytes]:
        """
        Raises:
            RequestError: a sample has failed.
        """
        ended = self._group.is_finished
        for index, sample, delta in self._group.news():
            raise_if_failed(sample)
            for choice in self._make(index, sample, delta):
                yield self._encoded(choice, sample)
        if ended and not self.has_ended:
            self.has_ended = True
            yield from self._ending()

    def _encoded(self, choice: Choice, sample: Sample) -> bytes:
        if self._options.continuous_usage_stats:
            whole = choice.whole() if isinstance(choice, TextOnly) else choice
            usage = self._extras.usage([sample], self._count_reasoning)
            return encoded_event({**self._chunk(whole), "usage": usage})
        if not isinstance(choice, TextOnly):
            return encoded_event(self._chunk(choice))
        place = choice.number, choice.shape
        frame = self._frames.get(place)
        if frame is None:
            frame = EventFrame(lambda text: self._chunk(choice._replace(text=text).whole()))
            self._frames[place] = frame
        return frame.event(choice.text)

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        return {**self._envelope, "choices": [choice], "usage": None}

    def _ending(self) -> Iterator[bytes]:
        samples, extras = self._group.samples, self._extras
        told = extras.sglext(samples)
        if told is not None:
            yield encoded_event({**self._envelope, "choices": [], "usage": None, "sglext": told})
        if extras.wants_usage(self._options):
            usage = extras.usage(samples, self._count_reasoning)
            yield encoded_event({**self._envelope, "choices": [], "usage": usage})
