"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from sglang.srt.entrypoints.answering import finished_or_gone, gone_response, openai_error
from sglang.srt.entrypoints.context import ServerContext, new_rid
from sglang.srt.entrypoints.custom_labels import labelled
from sglang.srt.entrypoints.fed_stream import FedStream
from sglang.srt.entrypoints.openai.answers import ChunkFeed, ending
from sglang.srt.entrypoints.openai.extras import Choice, Extras, TextOnly, TokenIds
from sglang.srt.entrypoints.openai.logprobs import CompletionLogprobs, hidden_state
from sglang.srt.entrypoints.openai.protocol import CompletionBody
from sglang.srt.entrypoints.reasoning_ends import with_thinking
from sglang.srt.managers.text_request import Delta, RequestError, Sample, TextRequest
from sglang.srt.utils.text_tokenizer import TextTokenizer

_DEFAULT_MAX_TOKENS = 16


async def answer_completion(request: Request, body: CompletionBody, context: ServerContext) -> Response:
    """
    Raises:
        RequestError: the request can't be served.
    """
    body.refuse_unsupported()
    manager = context.manager
    rid = body.rid or new_rid()
    asked = labelled(completion_requests(body, context, rid), context.args, request.headers)
    group = await manager.submit(asked)
    envelope = {
        "id": rid,
        "object": "text_completion",
        "created": int(time.time()),
        "model": body.model or context.model_name,
    }
    texts = _Texts(manager.tokenizer, body.echo)
    extras, token_ids = Extras.of(body, context.args), TokenIds(body)
    if body.stream:
        make = token_ids.adding(texts.choices)
        feed = ChunkFeed(envelope, group, make, body.stream_options, extras)
        return FedStream(feed, manager, group, openai_error)
    samples = await finished_or_gone(request, manager, group)
    if samples is None:
        return gone_response()
    choices = [texts.whole(i, sample) for i, sample in enumerate(samples)]
    token_ids.add(choices, samples)
    told = {"usage": extras.usage(samples), **extras.envelope(samples)}
    return JSONResponse({**envelope, "choices": choices, **told})


def completion_requests(body: CompletionBody, context: ServerContext, rid: str) -> list[TextRequest]:
    prompts = _prompts(body.prompt)
    most = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    sampling = body.sampling(context.sampling_defaults(), most)
    rids = [rid] if len(prompts) == 1 else [f"{rid}-{i}" for i in range(len(prompts))]
    parser, tokenizer = context.args.reasoning_parser, context.manager.tokenizer
    fields = {**body.scheduling(), "wish": body.wish(), "logprob_texts": True}
    return [
        with_thinking(
            TextRequest(prompt, sampling, own_rid, body.stream, call_rid=rid, **fields), parser, tokenizer
        )
        for prompt, own_rid in zip(prompts, rids, strict=True)
    ]


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt must not be empty")
    if isinstance(prompt[0], int):
        return [[token for token in prompt if isinstance(token, int)]]
    return [item for item in prompt if not isinstance(item, int)]


class _Texts:
    """Text of each choice; with ``echo``, the prompt comes first."""

    def __init__(self, tokenizer: TextTokenizer, echo: bool) -> None:
        self._tokenizer = tokenizer
        self._echo = echo
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def _prefix(self, sample: Sample) -> str:
        if not self._echo:
            return ""
        prompt = sample.request.prompt
        return prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)

    def whole(self, index: int, sample: Sample) -> dict[str, Any]:
        prefix = self._prefix(sample)
        logprobs = CompletionLogprobs(sample, self._tokenizer, prefix if self._echo else None)
        choice = {"index": index, "text": prefix + sample.text, "logprobs": logprobs.next()}
        return {**choice, **ending(sample), **hidden_state(sample)}

    def choices(self, index: int, sample: Sample, delta: Delta) -> Sequence[Choice]:
        text, logprobs = delta.text, self._logprobs.get(index)
        if logprobs is not None and sample.finish is None and sample.told is None:
            return [TextOnly(index, _running, text)] if text else []
        if logprobs is None:
            prefix = self._prefix(sample)
            text = prefix + text
            logprobs = CompletionLogprobs(sample, self._tokenizer, prefix if self._echo else None)
            self._logprobs[index] = logprobs
        if not text and sample.finish is None:
            return []
        choice = {"index": index, "text": text, "logprobs": logprobs.next(), **ending(sample)}
        return [choice if sample.finish is None else {**choice, **hidden_state(sample)}]


def _running(index: int, text: str) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": None, "matched_stop": None}
