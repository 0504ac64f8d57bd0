"""Log-probabilities as OpenAI's two endpoints show them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.incremental_decoder import PieceDecoder, piece_decoder
from sglang.srt.managers.text_reports import Entry, LogprobLists
from sglang.srt.managers.text_request import Sample
from sglang.srt.utils.text_tokenizer import TextTokenizer


def hidden_state(sample: Sample) -> dict[str, Any]:
    """Of an answer that has ended: the one its last id was chosen from, where it was asked for."""
    last = None if sample.told is None else sample.told.last_hidden_state
    return {} if last is None else {"hidden_states": last}


def chat_logprobs(sample: Sample, begin: int, end: int, tokenizer: TextTokenizer) -> dict[str, Any] | None:
    """Of the ids from ``begin`` to ``end`` of an answer; None: they were not asked for."""
    if sample.told is None or not sample.told.wishes_logprobs:
        return None
    lists = sample.told.output
    content = []
    for place in range(begin, min(end, len(lists.own))):
        likeliest = (lists.top[place] if lists.top else None) or []
        top = [_token(entry, tokenizer) for entry in likeliest]
        content.append({**_token(lists.own[place], tokenizer), "top_logprobs": top})
    return {"content": content}


def _token(entry: Entry, tokenizer: TextTokenizer) -> dict[str, Any]:
    logprob, token_id, text = entry
    assert text is not None, "OpenAI's endpoints ask for texts"
    exact = tokenizer.is_byte_level or tokenizer.has_byte_fallback
    own = tokenizer.token_bytes(token_id) if exact else text.encode()
    return {"token": text, "bytes": list(own), "logprob": logprob}


class CompletionLogprobs:
    """Of one choice of a completion, as it grows."""

    def __init__(self, sample: Sample, tokenizer: TextTokenizer, prefix: str | None) -> None:
        """``prefix``: the prompt's text where it is a part of the choice."""
        skips = sample.request.sampling.skip_special_tokens
        self._sample = sample
        self._tokenizer = tokenizer
        self._pieces = piece_decoder(tokenizer, skips)
        self._prefix = prefix
        self._offset = 0  # characters of the choice that come before the next id
        self._num_shown = 0

    def next(self) -> dict[str, Any] | None:
        """Of the ids that came since the last call; None: they were not asked for, or there are none."""
        told = self._sample.told
        if told is None or not told.wishes_logprobs:
            return None
        made = _Columns()
        if self._prefix is not None:
            pieces = piece_decoder(self._tokenizer, skip_special_tokens=True)
            self._add(made, told.prompt, 0, pieces)
            self._offset, self._prefix = len(self._prefix), None
        end = len(self._sample.output_ids)  # with a limit of 0 more is told, which OpenAI has no place for
        self._add(made, told.output, self._num_shown, self._pieces, end)
        self._num_shown = end
        return made.shown(bool(told.output.top or told.prompt.top)) if made.tokens else None

    def _add(
        self, made: _Columns, lists: LogprobLists, begin: int, pieces: PieceDecoder, end: int | None = None
    ) -> None:
        tops: Sequence[list[Entry] | None] = lists.top or [None] * len(lists.own)
        for (logprob, token_id, text), top in zip(lists.own[begin:end], tops[begin:end], strict=True):
            assert text is not None, "OpenAI's endpoints ask for texts"
            made.tokens.append(text)
            made.logprobs.append(logprob)
            made.offsets.append(self._offset)
            made.top.append(None if top is None else _by_text(top))
            self._offset += len(pieces.push(token_id))


class _Columns:
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.logprobs: list[float | None] = []
        self.top: list[dict[str, float | None] | None] = []
        self.offsets: list[int] = []

    def shown(self, has_top: bool) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.top if has_top else None,
            "text_offset": self.offsets,
        }


def _by_text(top: Sequence[Entry]) -> dict[str, float | None]:
    """Of ids with one text (parts of characters) the likeliest."""
    by_text: dict[str, float | None] = {}
    for logprob, _, text in top:
        by_text.setdefault(text or "", logprob)
    return by_text
