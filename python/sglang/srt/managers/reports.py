"""What a request wishes to know beside its text, and what it has been told so far."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.managers.io_struct import RequestWish, TokenReport
from sglang.srt.model_executor.step_plan import Logprobs, PrefillChunk, RowReport, RowWish, Vectors


class RequestReport:
    """Planner and admission read it, commit adds to it, outputs take what is new.

    A prompt's places are told in order and once, whatever the chunks and however often the request comes back
    from a retraction; those of its own ids when they become its ids.
    """

    def __init__(self, wish: RequestWish, prompt_len: int, temperature: float) -> None:
        """``temperature`` 0: greedy."""
        self._wish = wish
        self._temperature = temperature or 1.0
        self._last_scored = prompt_len - 1  # the place before the prompt's last id
        # Of what follows a place; the first id that is scored follows the place ``logprob_start``.
        self._next_scored = wish.logprob_start if wish.logprobs and wish.logprob_start >= 0 else prompt_len
        self._num_hidden = 0
        self._prompt: list[Logprobs] = []
        self._chosen: list[Logprobs] = []
        self._hidden: list[Vectors] = []
        self._unkept_id: int | None = None

    @property
    def first_needed(self) -> int | None:
        """The first place that must be computed even if its KV is known; None: there is none."""
        needed = [self._num_hidden] if self._wish.hidden_states == "all" else []
        if self._next_scored < self._last_scored:
            needed.append(self._next_scored)
        return min(needed, default=None)

    def of_decode(self, row: int) -> RowWish:
        return self._row_wish(row, chooses=True, hidden_from=0 if self._wish.hidden_states else None)

    def of_chunk(self, row: int, chunk: PrefillChunk) -> RowWish | None:
        """Asked when the chunk is planned: those before it may not have been told yet."""
        start, size = chunk.start, len(chunk.token_ids)
        begin = min(max(self._next_scored - start, 0), size)
        end = min(max(self._last_scored - start, begin), size)
        hidden_from = None
        if self._wish.hidden_states == "all":
            untold = max(self._num_hidden - start, 0)  # who comes back may begin before what was told
            hidden_from = untold if untold < size else None
        elif self._wish.hidden_states and chunk.is_last:
            hidden_from = size - 1
        wish = self._row_wish(row, chunk.is_last, hidden_from, begin, end)
        return wish if wish.logprobs or wish.num_prompt or hidden_from is not None else None

    def _row_wish(
        self, row: int, chooses: bool, hidden_from: int | None, prompt_from: int = 0, prompt_to: int = 0
    ) -> RowWish:
        wish = self._wish
        return RowWish(
            row=row,
            logprobs=wish.logprobs and chooses,
            prompt_from=prompt_from,
            prompt_to=prompt_to,
            num_top=wish.num_top,
            token_ids=wish.token_ids or (),
            temperature=self._temperature,
            hidden_from=hidden_from,
        )

    def add_decode(self, report: RowReport, num_kept: int) -> None:
        """``num_kept``: how many of the row's ids became the request's."""
        self._add(report.chosen.first(num_kept), report.hidden.first(num_kept))

    def add_unkept(self, report: RowReport, token: int) -> None:
        """Of the last chunk, where the answer is to have no ids: it is told what its first one was."""
        self._unkept_id = token
        self.add_chunk(report, 1)

    def add_chunk(self, report: RowReport, num_kept: int) -> None:
        if report.prompt.own:
            self._prompt.append(report.prompt)
            self._next_scored += len(report.prompt.own)
        self._add(report.chosen.first(num_kept), report.hidden)

    def _add(self, chosen: Logprobs, hidden: Vectors) -> None:
        if chosen.own:
            self._chosen.append(chosen)
        if not hidden.count:
            return
        self._num_hidden += hidden.count
        if self._wish.hidden_states == "last":
            hidden = hidden.last()
            self._hidden.clear()
        self._hidden.append(hidden)

    def take(self) -> TokenReport:
        """What is new since the last call."""
        hidden = tuple(self._hidden)
        report = TokenReport(joined(self._prompt), joined(self._chosen), hidden, self._unkept_id)
        self._prompt, self._chosen, self._hidden = [], [], []
        return report


def joined(parts: Sequence[Logprobs]) -> Logprobs:
    if len(parts) == 1:
        return parts[0]
    return Logprobs(
        own=tuple(value for part in parts for value in part.own),
        top=tuple(line for part in parts for line in part.top),
        top_ids=tuple(ids for part in parts for ids in part.top_ids),
        named=tuple(line for part in parts for line in part.named),
    )
