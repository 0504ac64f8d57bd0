"""What ends the part of a reply that is reasoning: a grammar has no say in it, and a budget may limit it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.parser.reasoning import REASONING_FORMATS, ReasoningFormat
from sglang.srt.sampling.sampling_params import ReasoningEnd
from sglang.srt.utils.text_tokenizer import TextTokenizer

_PROMPT_END: Final = 16  # ids that are enough to see how a prompt ends


def reasoning_mark(parser: str | None) -> str:
    """Of --reasoning-parser; without one, what most models write."""
    return REASONING_FORMATS.get(parser or "", ReasoningFormat()).end


def prompt_end(prompt: str | list[int], tokenizer: TextTokenizer) -> str:
    if isinstance(prompt, str):
        return prompt
    return tokenizer.decode(prompt[-_PROMPT_END:], skip_special_tokens=False)


def with_thinking(
    request: TextRequest, parser: str | None, tokenizer: TextTokenizer, is_known: bool = False
) -> TextRequest:
    """With the part that its thinking budget is about, if it has one. ``is_known``: where it would end is.

    Raises:
        RequestError: the server does not know where the model's reasoning ends.
    """
    if request.sampling.thinking_budget is None or request.processor is not None:
        return request  # a processor has the budget among its parameters
    form = REASONING_FORMATS.get(parser or "")
    if form is not None and form.channels:
        raise RequestError(f"thinking_budget is not supported with --reasoning-parser {parser}: leave it out")
    if request.reasoning_end is not None or (is_known and form is not None):
        return replace(request, thinking=request.reasoning_end)
    if form is None:
        raise RequestError(
            "thinking_budget needs a server with --reasoning-parser, which says where the reasoning ends"
        )
    end = prompt_end(request.prompt, tokenizer).rstrip()
    if form.is_open(end):
        return replace(request, thinking=ReasoningEnd(form.end))
    begin_id = tokenizer.token_id(form.begin)
    if begin_id is None or end.endswith(form.end):
        return request  # there is none, or none whose beginning could be seen
    return replace(request, thinking=ReasoningEnd(form.end, begin_id))
