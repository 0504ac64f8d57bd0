"""What is told beside OpenAI's own fields, as a request or the server's flags ask for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sglang.srt.entrypoints.meta_info import meta_info, spec_info
from sglang.srt.entrypoints.openai.protocol import ChatBody, CompletionBody, GenerationBody, StreamOptions
from sglang.srt.managers.io_struct import RequestStats
from sglang.srt.managers.text_request import Delta, RequestError, Sample
from sglang.srt.server_args import ServerArgs

Shape = Callable[[int, str], dict[str, Any]]


class TextOnly(NamedTuple):
    """A choice of a stream that adds a text and tells nothing else."""

    number: int
    shape: Shape  # makes the choice of its number and text; the same function for all that differ in these
    text: str

    def whole(self) -> dict[str, Any]:
        return self.shape(self.number, self.text)


Choice = TextOnly | dict[str, Any]
MakeChoice = Callable[[int, Sample, Delta], Sequence[Choice]]

_OLD_NAMES = ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram")


def no_reasoning(_: Sample) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class Extras:
    cache_report: bool  # usage says how much of the prompt was cached
    always_usage: bool  # at the end of every stream
    cached_tokens: bool
    spec_tokens: bool

    @staticmethod
    def of(body: GenerationBody, args: ServerArgs) -> Extras:
        return Extras(
            cache_report=args.enable_cache_report,
            always_usage=args.stream_response_default_include_usage,
            cached_tokens=body.return_cached_tokens_details,
            spec_tokens=body.return_spec_tokens_details,
        )

    def wants_usage(self, options: StreamOptions) -> bool:
        return options.include_usage or self.always_usage

    def usage(
        self, samples: Sequence[Sample], count_reasoning: Callable[[Sample], int] = no_reasoning
    ) -> dict[str, Any]:
        """A prompt counts once, however many samples are made of it; what was cached of it, before the first
        of them.
        """
        prompts: dict[int, RequestStats] = {}
        for sample in samples:
            prompts.setdefault(id(sample.request), sample.stats)
        prompt_tokens = sum(stats.prompt_tokens for stats in prompts.values())
        completion_tokens = sum(sample.stats.completion_tokens for sample in samples)
        cached = sum(stats.cached_tokens for stats in prompts.values())
        reasoning = sum(map(count_reasoning, samples))
        told = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "reasoning_tokens": reasoning,
            "prompt_tokens_details": {"cached_tokens": cached} if self.cache_report else None,
        }
        return told | ({"completion_tokens_details": {"reasoning_tokens": reasoning}} if reasoning else {})

    def sglext(self, samples: Sequence[Sample]) -> dict[str, Any] | None:
        """Of samples that have ended; None where nothing is asked for, or there is nothing to tell."""
        told: dict[str, Any] = {}
        if self.cached_tokens and samples:
            told["cached_tokens_details"] = {"device": samples[0].stats.cached_tokens, "host": 0}
        if self.spec_tokens:
            details = [_spec_details(sample.stats) for sample in samples]
            if any(details):
                told["spec_tokens_details"] = details[0] if len(details) == 1 else details
        return told or None

    def envelope(self, samples: Sequence[Sample]) -> dict[str, Any]:
        told = self.sglext(samples)
        return {} if told is None else {"sglext": told}


def _spec_details(stats: RequestStats) -> dict[str, Any]:
    return {name: value for name, value in spec_info(stats).items() if name not in _OLD_NAMES}


def add_chat_extras(
    choices: list[dict[str, Any]], samples: Sequence[Sample], body: ChatBody, version: str
) -> None:
    """To those of a whole answer. ``version``: of the weights."""
    for choice, sample in zip(choices, samples, strict=True):
        if body.return_prompt_token_ids or body.return_token_ids:
            choice["prompt_token_ids"] = sample.prompt_ids
        if body.return_token_ids:
            choice["response_token_ids"] = list(sample.output_ids)
        if body.return_meta_info:
            choice["meta_info"] = meta_info(sample, version)


def refuse_streamed(body: ChatBody) -> None:
    """
    Raises:
        RequestError: a stream is to tell what only a whole answer does.
    """
    for name in ("return_prompt_token_ids", "return_token_ids", "return_meta_info"):
        if body.stream and getattr(body, name):
            raise RequestError(f"{name} is told with a whole answer alone: leave out stream, or {name}")


class TokenIds:
    """With ``return_token_ids``: each choice of a completion has its ids, the first one the prompt's too."""

    def __init__(self, body: CompletionBody) -> None:
        self._wanted = body.return_token_ids
        self._opened: set[int] = set()
        self._untold: dict[int, list[int]] = {}  # of ids that have made no text yet

    def add(self, choices: list[dict[str, Any]], samples: Sequence[Sample]) -> None:
        """To those of a whole answer."""
        for choice, sample in zip(choices, samples, strict=True):
            self._tell(choice, sample, sample.output_ids)

    def adding(self, make: MakeChoice) -> MakeChoice:
        """To those of a stream."""
        if not self._wanted:
            return make

        def choices(index: int, sample: Sample, delta: Delta) -> list[dict[str, Any]]:
            made = [one.whole() if isinstance(one, TextOnly) else one for one in make(index, sample, delta)]
            ids = self._untold.pop(index, []) + delta.ids
            for choice in made[:1]:
                self._tell(choice, sample, ids)
            if not made:
                self._untold[index] = ids
            return made

        return choices

    def _tell(self, choice: dict[str, Any], sample: Sample, ids: list[int]) -> None:
        if not self._wanted:
            return
        choice["token_ids"] = list(ids)
        if choice["index"] not in self._opened:
            self._opened.add(choice["index"])
            choice["prompt_token_ids"] = sample.prompt_ids
