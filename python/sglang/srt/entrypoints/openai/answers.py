"""What chat and text completions have in common: usage, finish reasons, streams of several samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang.srt.entrypoints.answering import raise_if_failed
from sglang.srt.entrypoints.openai.extras import Extras, MakeChoice, no_reasoning
from sglang.srt.entrypoints.openai.protocol import StreamOptions
from sglang.srt.managers.text_request import Group, Sample


def ending(sample: Sample) -> dict[str, Any]:
    """``finish_reason`` and ``matched_stop``; both None while it runs."""
    finish = sample.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.type, "matched_stop": finish.matched}


async def stream_chunks(
    envelope: dict[str, Any],
    group: Group,
    make_choices: MakeChoice,
    options: StreamOptions | None,
    extras: Extras,
    count_reasoning: Callable[[Sample], int] = no_reasoning,
) -> AsyncIterator[dict[str, Any]]:
    """A chunk for each choice that ``make_choices`` makes of a sample's news, ``sglext`` and the usage at the
    end.

    Raises:
        RequestError: a sample has failed.
    """
    options = options or StreamOptions()
    async for index, sample, delta in group.updates():
        raise_if_failed(sample)
        for choice in make_choices(index, sample, delta):
            chunk = {**envelope, "choices": [choice], "usage": None}
            if options.continuous_usage_stats:
                chunk["usage"] = extras.usage([sample], count_reasoning)
            yield chunk
    told = extras.sglext(group.samples)
    if told is not None:
        yield {**envelope, "choices": [], "usage": None, "sglext": told}
    if extras.wants_usage(options):
        yield {**envelope, "choices": [], "usage": extras.usage(group.samples, count_reasoning)}
