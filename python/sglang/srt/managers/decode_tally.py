"""Sums over the decode rows of one step whose requests were still alive."""

from __future__ import annotations

from sglang.srt.managers.metrics import DecodeReport
from sglang.srt.managers.request import Request
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.speculative.controller import ClassTally


class DecodeTally:
    def __init__(self, draft_len: int, spec: SpecShape | None) -> None:
        self.draft_len = draft_len
        self._num_drafts = spec.num_nodes(draft_len) - 1 if spec else 0  # in a row's chain or tree
        self.num_rows = 0
        self._num_tokens = 0
        self._num_correct = 0
        self._num_proposed = 0
        # class -> (drafts that a row can accept, [draft_len + 1] rows by drafts accepted)
        self._classes: dict[str, tuple[int, list[int]]] = {}

    def add_plain(self, num_kept: int) -> None:
        self.num_rows += 1
        self._num_tokens += num_kept

    def add(self, request: Request, num_kept: int, num_correct: int) -> int:
        """Drafts that the row could accept are returned."""
        cap = request.sampling.draft_cap
        num_proposed = self._num_drafts if cap is None else min(cap, self._num_drafts)
        self.num_rows += 1
        self._num_tokens += num_kept
        self._num_correct += num_correct
        self._num_proposed += num_proposed
        found = self._classes.get(request.draft_class)
        if found is None:
            found = (request.max_accepted(self.draft_len), [0] * (self.draft_len + 1))
            self._classes[request.draft_class] = found
        found[1][num_correct] += 1
        return num_proposed

    def report(self) -> DecodeReport:
        proposed, correct = [0] * self.draft_len, [0] * self.draft_len
        for most, rows_by_count in self._classes.values():
            num_rows = sum(rows_by_count)
            for depth, reached in enumerate(_by_depth(rows_by_count)):
                proposed[depth] += num_rows if depth < most else 0
                correct[depth] += reached
        return DecodeReport(
            draft_len=self.draft_len,
            num_rows=self.num_rows,
            num_tokens=self._num_tokens,
            num_correct_drafts=self._num_correct,
            num_proposed_drafts=self._num_proposed,
            proposed_by_depth=tuple(proposed),
            correct_by_depth=tuple(correct),
        )

    def by_class(self) -> tuple[ClassTally, ...]:
        """Of the classes that accept drafts. A capped one is known by what it never accepts."""
        return tuple(
            ClassTally(name, (sum(rows_by_count),) * self.draft_len, _by_depth(rows_by_count))
            for name, (_, rows_by_count) in self._classes.items()
            if name
        )


def _by_depth(rows_by_count: list[int]) -> tuple[int, ...]:
    """Rows that accepted a draft at depth 1, 2, …, from rows by the drafts they accepted."""
    return tuple(sum(rows_by_count[depth:]) for depth in range(1, len(rows_by_count)))
