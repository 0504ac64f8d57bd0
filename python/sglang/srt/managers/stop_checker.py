"""Where a request ends inside the ids a step chose for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.request import Request
from sglang.srt.sampling.sampling_params import SamplingParams

# Ids before a stop string's own bytes, so that a window that begins inside a character (or whose
# first blank the tokenizer drops) still decodes the part that matters.
WINDOW_MARGIN = 4


@dataclass(frozen=True, slots=True)
class StopHit:
    num_kept: int  # of the new ids, the one that stops included
    finish: FinishReason
    stop_trim: str | None = None


class StopChecker:
    def __init__(self, eos_ids: Sequence[int], decode: Callable[[list[int]], str]) -> None:
        self._eos_ids = tuple(sorted(eos_ids))
        self._decode = decode

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        return params.stop_token_ids if params.ignore_eos else (*self._eos_ids, *params.stop_token_ids)

    def check(self, request: Request, new_ids: Sequence[int]) -> StopHit | None:
        """``new_ids`` follow the request's known ids; an accepted run may go on past the stop."""
        hit = self._check_ids(request, new_ids)
        if not request.params.stop:
            return hit
        # At one and the same token, length and stop ids come before stop strings, as upstream.
        end = len(new_ids) if hit is None else hit.num_kept - 1
        return self._check_strings(request, new_ids[:end]) or hit

    def _check_ids(self, request: Request, new_ids: Sequence[int]) -> StopHit | None:
        params = request.params
        stop_ids = self.stop_ids(params)
        for index, token in enumerate(new_ids):
            count = request.num_outputs + index + 1
            if count >= request.max_new_tokens:
                return StopHit(index + 1, FinishReason(type="length", length=count))
            if token in stop_ids and count > params.min_new_tokens:
                return StopHit(index + 1, FinishReason(type="stop", matched=token))
        return None

    def _check_strings(self, request: Request, new_ids: Sequence[int]) -> StopHit | None:
        params = request.params
        outputs = request.ids[max(request.prompt_len, len(request.ids) - self._window(params)) :]
        if self._find(params.stop, outputs + list(new_ids)) is None:
            return None
        for count in range(1, len(new_ids) + 1):
            matched = self._find(params.stop, outputs + list(new_ids[:count]))
            if matched is None or request.num_outputs + count < params.min_new_tokens:
                continue
            before = outputs + list(new_ids[: count - 1])
            if params.min_new_tokens and self._find((matched,), before) is not None:
                continue  # an old match, from before min_new_tokens
            trim = None if params.no_stop_trim else matched
            return StopHit(count, FinishReason(type="stop", matched=matched), trim)
        return None

    @staticmethod
    def _window(params: SamplingParams) -> int:
        """So many ids back a match that ends in a new id can begin (an id is at least one byte)."""
        return max(len(stop.encode()) for stop in params.stop) + WINDOW_MARGIN

    def _find(self, stops: Sequence[str], ids: list[int]) -> str | None:
        """The stop string that comes first in the text."""
        if not ids:
            return None
        text = self._decode(ids)
        places = [(text.find(stop), order) for order, stop in enumerate(stops)]
        found = [place for place in places if place[0] >= 0]
        return stops[min(found)[1]] if found else None
