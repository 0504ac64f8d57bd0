"""What chat and text completions have in common: usage, finish reasons, streams of several samples."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from sglang.srt.entrypoints.answering import raise_if_failed
from sglang.srt.entrypoints.openai.protocol import StreamOptions
from sglang.srt.managers.text_request import Delta, Group, Sample

MakeChoice = Callable[[int, Sample, Delta], list[dict[str, Any]]]


def ending(sample: Sample) -> dict[str, Any]:
    """``finish_reason`` and ``matched_stop``; both None while it runs."""
    finish = sample.finish
    if finish is None:
        return {"finish_reason": None, "matched_stop": None}
    return {"finish_reason": finish.type, "matched_stop": finish.matched}


def no_reasoning(_: Sample) -> int:
    return 0


def usage(
    samples: Sequence[Sample], count_reasoning: Callable[[Sample], int] = no_reasoning
) -> dict[str, Any]:
    """A prompt counts once, however many samples are made of it."""
    prompts = {id(sample.request): sample.stats.prompt_tokens for sample in samples}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(sample.stats.completion_tokens for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "reasoning_tokens": sum(map(count_reasoning, samples)),
        "prompt_tokens_details": None,
    }


async def stream_chunks(
    envelope: dict[str, Any],
    group: Group,
    make_choices: MakeChoice,
    options: StreamOptions | None,
    count_reasoning: Callable[[Sample], int] = no_reasoning,
) -> AsyncIterator[dict[str, Any]]:
    """A chunk for each choice that ``make_choices`` makes of a sample's news, and the usage at the end.

    Raises:
        RequestError: a sample has failed.
    """
    options = options or StreamOptions()
    async for index, sample, delta in group.updates():
        raise_if_failed(sample)
        for choice in make_choices(index, sample, delta):
            chunk = {**envelope, "choices": [choice], "usage": None}
            if options.continuous_usage_stats:
                chunk["usage"] = usage([sample], count_reasoning)
            yield chunk
    if options.include_usage:
        yield {**envelope, "choices": [], "usage": usage(group.samples, count_reasoning)}
