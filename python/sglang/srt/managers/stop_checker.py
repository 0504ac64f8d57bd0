"""Where a request ends inside the ids a step chose for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang.srt.managers.finish import BAD_REQUEST, abort_reason
from sglang.srt.managers.io_struct import FinishReason
from sglang.srt.managers.request import Request
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.stop_regex import StopRegexTooSlow

# Ids before a stop string's own bytes, so that a window that begins inside a character (or whose
# first blank the tokenizer drops) still decodes the part that matters.
WINDOW_MARGIN = 4

TOO_SLOW = "a stop_regex takes too long on this reply: simplify it"

_INCOMPLETE = "\ufffd"  # stands for the bytes of a character that is not complete yet


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
        reaches_limit = len(request.ids) + len(new_ids) >= request.max_ids
        params = request.params
        reads_text = params.stop or params.stop_regex
        if not reaches_limit and not reads_text and request.stop_ids.isdisjoint(new_ids):
            return None  # so it is nearly always
        hit = self._check_ids(request, new_ids)
        # At one and the same token, length and stop ids come before stop strings, as upstream, and these
        # before patterns.
        if params.stop:
            hit = self._check_strings(request, new_ids[: _end(new_ids, hit)]) or hit
        if params.stop_regex:
            hit = self._check_patterns(request, new_ids[: _end(new_ids, hit)]) or hit
        return hit

    def _check_ids(self, request: Request, new_ids: Sequence[int]) -> StopHit | None:
        num_before, stop_ids = request.num_outputs, request.stop_ids
        for count, token in enumerate(new_ids, start=num_before + 1):
            if count >= request.max_new_tokens:
                # With a limit of 0 (the prompt is to be computed and told about) the first id isn't kept.
                most = request.max_new_tokens
                return StopHit(most - num_before, FinishReason(type="length", length=most))
            if token in stop_ids and count > request.params.min_new_tokens:
                return StopHit(count - num_before, FinishReason(type="stop", matched=token))
        return None

    def _check_strings(self, request: Request, new_ids: Sequence[int]) -> StopHit | None:
        params = request.params
        ids = request.ids[max(request.prompt_len, len(request.ids) - self._window(params)) :]
        text = self._decode([*ids, *new_ids])
        if not any(stop in text for stop in params.stop):
            return None
        before = self._decode(ids) if ids else ""
        for count, token in enumerate(new_ids, start=1):
            ids = [*ids, token]
            after = self._decode(ids)
            matched = _new_match(params.stop, before, after)
            if matched is not None and request.num_outputs + count >= params.min_new_tokens:
                trim = None if params.no_stop_trim else matched
                return StopHit(count, FinishReason(type="stop", matched=matched), trim)
            before = after
        return None

    def _check_patterns(self, request: Request, new_ids: Sequence[int]) -> StopHit | None:
        """The text keeps what a pattern matched, as upstream."""
        search = request.stop_search
        assert search is not None and search.num_ids == request.num_outputs
        for count, token in enumerate(new_ids, start=1):
            search.push(token, self._decode)
            if request.num_outputs + count < request.params.min_new_tokens:
                continue
            try:
                completed = search.completed()
            except StopRegexTooSlow:
                return StopHit(count, abort_reason(TOO_SLOW, BAD_REQUEST))
            if completed is not None:
                return StopHit(count, FinishReason(type="stop", matched=completed))
        return None

    @staticmethod
    def _window(params: SamplingParams) -> int:
        """So many ids back a match that ends in a new id can begin (an id is at least one byte)."""
        return max(len(stop.encode()) for stop in params.stop) + WINDOW_MARGIN


def _end(new_ids: Sequence[int], hit: StopHit | None) -> int:
    """So many ids come before the one that stops."""
    return len(new_ids) if hit is None else max(hit.num_kept - 1, 0)


def _new_match(stops: Sequence[str], before: str, after: str) -> str | None:
    """The stop string that comes first among those that end in what ``after`` adds to ``before``.

    A match that was complete before is no matter: it lay before ``min_new_tokens``.
    """
    certain = len(before.rstrip(_INCOMPLETE))
    places = [(after.find(stop, max(0, certain - len(stop) + 1)), order) for order, stop in enumerate(stops)]
    found = [place for place in places if place[0] >= 0]
    return stops[min(found)[1]] if found else None
