"""What one sample has been told beside its text, as answers show it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec

from sglang.srt.managers.io_struct import RequestWish, TokenReport
from sglang.srt.model_executor.step_plan import Logprobs, Vectors

Entry = tuple[float | None, int, str | None]
"""log-probability, id, its text (None: not wanted). A prompt's first one has no log-probability."""


class LogprobLists:
    """Of neighbouring places; they grow. What is not wished stays empty."""

    def __init__(self) -> None:
        self.own: list[Entry] = []
        self.top: list[list[Entry] | None] = []
        self.named: list[list[Entry] | None] = []

    def begin(self, token_id: int, text: str | None, wish: RequestWish) -> None:
        """The first id of a prompt that is shown: nothing before it was looked at."""
        self.own.append((None, token_id, text))
        if wish.num_top:
            self.top.append(None)
        if wish.token_ids:
            self.named.append(None)


class TextReport:
    """Grows with a sample's outputs."""

    def __init__(
        self, wish: RequestWish, prompt_ids: list[int], text_of: Callable[[int], str | None]
    ) -> None:
        self._wish = wish
        self._prompt_ids = prompt_ids
        self._text_of = text_of
        self._next = wish.logprob_start if wish.logprob_start >= 0 else len(prompt_ids)
        self.prompt = LogprobLists()
        self.output = LogprobLists()
        self._hidden: list[Vectors] = []  # numbers of Python's would be eight times as large
        if wish.logprobs and self._next < len(prompt_ids):
            first = prompt_ids[self._next]
            self._next += 1
            self.prompt.begin(first, text_of(first), wish)

    def add(self, report: TokenReport, new_ids: Sequence[int]) -> None:
        count = len(report.prompt.own)
        self._extend(self.prompt, report.prompt, self._prompt_ids[self._next : self._next + count])
        self._next += count
        ids = new_ids if report.unkept_id is None else (report.unkept_id,)
        self._extend(self.output, report.chosen, ids)
        if report.hidden and self._wish.hidden_states == "last":
            self._hidden = [report.hidden[-1].last()]
        else:
            self._hidden += report.hidden

    def _extend(self, lists: LogprobLists, told: Logprobs, ids: Sequence[int]) -> None:
        text_of = self._text_of
        for own, token_id in zip(told.own, ids, strict=False):
            lists.own.append((own, token_id, text_of(token_id)))
        for values, top_ids in zip(told.top, told.top_ids, strict=True):
            lists.top.append([(v, i, text_of(i)) for v, i in zip(values, top_ids, strict=True)])
        named_ids = self._wish.token_ids or ()
        for values in told.named:
            lists.named.append([(v, i, text_of(i)) for v, i in zip(values, named_ids, strict=True)])

    def meta_info(self, begin: int, is_finished: bool, encoded: bool = False) -> dict[str, Any]:
        """Under SGLang's names; of outputs those from ``begin`` on. Hidden states come with the end: they are
        large, and an event that repeated them would keep everybody waiting. ``encoded``: they are JSON."""
        info: dict[str, Any] = {}
        if self._wish.logprobs:
            info["input_token_logprobs"] = self.prompt.own[:]
            info["output_token_logprobs"] = self.output.own[begin:]
            info["output_token_logprobs_length"] = len(self.output.own)
            if self._wish.num_top:
                info["input_top_logprobs"] = self.prompt.top[:]
                info["output_top_logprobs"] = self.output.top[begin:]
            if self._wish.token_ids:
                info["input_token_ids_logprobs"] = self.prompt.named[:]
                info["output_token_ids_logprobs"] = self.output.named[begin:]
        if self._wish.hidden_states and is_finished and self._hidden:
            info["hidden_states"] = msgspec.Raw(self._hidden_json()) if encoded else self._hidden_states()
        return info

    @property
    def wishes_logprobs(self) -> bool:
        return self._wish.logprobs

    @property
    def has_all_hidden_states(self) -> bool:
        return self._wish.hidden_states == "all" and bool(self._hidden)

    @property
    def last_hidden_state(self) -> list[float] | None:
        """The one that the last id was chosen from; None: it was not asked for, or there is none."""
        return next(_rows([self._hidden[-1].last()])) if self._hidden else None

    def _hidden_states(self) -> list[Any]:
        """The prompt's as one matrix, then a vector for each id that followed but the last; or one vector."""
        rows = _rows(self._hidden)
        if self._wish.hidden_states == "last":
            return next(rows)
        return [list(islice(rows, len(self._prompt_ids))), *rows]

    def _hidden_json(self) -> bytearray:
        """The same, with a single row of it as Python's numbers at a time."""
        rows = map(msgspec.json.encode, _rows(self._hidden))
        if self._wish.hidden_states == "last":
            return bytearray(next(rows))
        made = bytearray(b"[[")
        for number, row in enumerate(rows):
            if number:
                made += b"]," if number == len(self._prompt_ids) else b","
            made += row
        made += b"]]" if number < len(self._prompt_ids) else b"]"
        return made


def _rows(parts: Iterable[Vectors]) -> Iterator[list[float]]:
    for part in parts:
        values = array("d" if part.kind == "d" else "f", part.data)
        for at in range(0, len(values), part.size):
            yield values[at : at + part.size].tolist()
