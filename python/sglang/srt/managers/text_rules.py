"""Words and marks as tokens: what of a request's rules only a tokenizer can say."""

from __future__ import annotations

from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.sampling.sampling_params import MAX_LOGIT_BIASES, ChoiceRules, ThinkingLimit
from sglang.srt.utils.text_tokenizer import TextTokenizer


def choice_rules(request: TextRequest, tokenizer: TextTokenizer, vocab_size: int) -> ChoiceRules | None:
    """None: there are none.

    Raises:
        RequestError: a word has no tokens, or there are too many.
    """
    params = request.sampling
    words = _spellings(params.bad_words, tokenizer, vocab_size)
    if sum(len(word) == 1 for word in words) + len(params.logit_bias) > MAX_LOGIT_BIASES:
        raise RequestError(f"bad_words and logit_bias may have at most {MAX_LOGIT_BIASES} tokens together")
    thinking = None
    if params.thinking_budget is not None and request.thinking is not None:
        end_ids = tuple(tokenizer.encode(request.thinking.text, add_special_tokens=False))
        thinking = ThinkingLimit(params.thinking_budget, request.thinking, end_ids)
    return ChoiceRules(words, thinking) if words or thinking is not None else None


def _spellings(
    words: tuple[str, ...], tokenizer: TextTokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Each word as it begins a text, and behind a blank."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False)) if bare else ()
            if not ids or max(ids) >= vocab_size:
                raise RequestError(f"bad_words: {word!r} has no tokens in this model's vocabulary")
            found[ids] = None
    return tuple(found)
