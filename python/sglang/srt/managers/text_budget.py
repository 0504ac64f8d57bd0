"""How much of hidden states answers may hold: a long prompt's are gigabytes, and far more as text."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sglang.srt.managers.text_request import RequestError, Sample

MOST_OF_REQUEST: Final = 16 << 20  # numbers: 64 MiB, and 300 MB as text
MOST_OF_ALL: Final = 4 * MOST_OF_REQUEST


@dataclass(slots=True)
class _Taken:
    numbers: int = 0

    def give_back(self, numbers: int) -> None:
        self.numbers -= numbers


class HiddenBudget:
    """Of requests for all hidden states. What one may come to is taken until nobody has its answer."""

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._taken = _Taken()

    @property
    def taken(self) -> int:
        return self._taken.numbers

    def take(self, samples: Sequence[tuple[Sample, int]]) -> None:
        """Of one request, with the most ids that each of its answers may have.

        Raises:
            RequestError: it is too much, for one request or beside the others. Nothing is taken then.
        """
        wishing = [
            (sample, len(sample.prompt_ids) + most)
            for sample, most in samples
            if sample.request.wish is not None and sample.request.wish.hidden_states == "all"
        ]
        if not wishing:
            return
        size, places = self._hidden_size, sum(count for _, count in wishing)
        if places * size > MOST_OF_REQUEST:
            raise RequestError(
                f"return_hidden_states: {places} tokens (prompts and max_new_tokens of all samples) with"
                f" {size} numbers each are more than {MOST_OF_REQUEST}, the limit of a request: ask for at"
                f' most {MOST_OF_REQUEST // size} tokens, or for "last"'
            )
        if self.taken + places * size > MOST_OF_ALL:
            raise RequestError(
                f"return_hidden_states: other requests hold {self.taken} numbers, and {places * size} more"
                f" would be above {MOST_OF_ALL}, the limit of all requests: ask again when they have ended",
                503,
            )
        for sample, count in wishing:
            self._taken.numbers += count * size
            weakref.finalize(sample.told, self._taken.give_back, count * size)
