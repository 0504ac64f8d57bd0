"""Sums over the decode rows of one step whose requests were still alive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from sglang.srt.managers.metrics import DecodeReport
from sglang.srt.managers.request import Request
from sglang.srt.model_executor.step_plan import SpecShape
from sglang.srt.speculative.controller import ClassTally

NEW_STEPS: Final = 8
"""So many speculative steps of a request tell of its class where rows have draft lengths of their own: later
on those that accept much have most of the drafts, and their class would be thought as good as they are."""


@dataclass(slots=True)
class _Group:
    """Rows that are counted together."""

    draft_class: str
    most: int  # drafts that each could accept
    tells: bool  # of its class
    counts: list[int]  # [draft_len + 1] rows by drafts accepted


class DecodeTally:
    def __init__(self, draft_len: int, spec: SpecShape | None, is_ragged: bool = False) -> None:
        """``is_ragged``: rows have draft lengths of their own."""
        self.draft_len = draft_len
        self._num_drafts = spec.num_nodes(draft_len) - 1 if spec else 0  # in a row's chain or tree
        self._is_ragged = is_ragged
        self.num_rows = 0
        self._num_tokens = 0
        self._sum_seq_lens = 0
        self._num_correct = 0
        self._num_proposed = 0
        self._groups: dict[object, _Group] = {}

    def add_plain(self, request: Request, num_kept: int) -> None:
        """A row of a step without drafts."""
        self.num_rows += 1
        self._num_tokens += num_kept
        self._sum_seq_lens += len(request.ids)

    def add(self, request: Request, num_kept: int, num_correct: int, drafts: int, most: int) -> int:
        """``drafts``: that the row verified (levels of a tree); ``most``: that it could accept by its cap.
        Drafts that it could accept (of a tree all of them) are returned.
        """
        self.add_plain(request, num_kept)
        key: object = request.draft_class
        tells, num_proposed = True, most
        if self._is_ragged:
            tells = request.counters.decode_steps_spec < NEW_STEPS
            key = (key, most, tells)
        elif self._num_drafts != drafts:  # a tree
            cap = request.sampling.draft_cap
            num_proposed = self._num_drafts if cap is None else min(cap, self._num_drafts)
        self._num_correct += num_correct
        self._num_proposed += num_proposed
        group = self._groups.get(key)
        if group is None:
            group = _Group(request.draft_class, most, tells, [0] * (self.draft_len + 1))
            self._groups[key] = group
        group.counts[num_correct] += 1
        return num_proposed

    def report(self) -> DecodeReport:
        proposed, correct = [0] * self.draft_len, [0] * self.draft_len
        for group in self._groups.values():
            num_rows = sum(group.counts)
            for depth, reached in enumerate(_by_depth(group.counts)):
                proposed[depth] += num_rows if depth < group.most else 0
                correct[depth] += reached
        return DecodeReport(
            draft_len=self.draft_len,
            num_rows=self.num_rows,
            num_tokens=self._num_tokens,
            num_correct_drafts=self._num_correct,
            num_proposed_drafts=self._num_proposed,
            proposed_by_depth=tuple(proposed),
            correct_by_depth=tuple(correct),
            sum_seq_lens=self._sum_seq_lens,
            is_ragged=self._is_ragged,
        )

    def by_class(self) -> tuple[ClassTally, ...]:
        """Of the classes that accept drafts. A capped one is known by what it never accepts; but where rows
        have draft lengths of their own, what wasn't tried says nothing.
        """
        found: dict[str, tuple[list[int], list[int]]] = {}
        for group in self._groups.values():
            if not group.draft_class or not group.tells:
                continue
            empty = ([0] * self.draft_len, [0] * self.draft_len)
            proposed, correct = found.setdefault(group.draft_class, empty)
            came = (sum(group.counts), *_by_depth(group.counts))
            for depth in range(self.draft_len):
                correct[depth] += came[depth + 1]
                if not self._is_ragged:
                    proposed[depth] += came[0]
                elif depth < group.most:
                    proposed[depth] += came[depth]
        return tuple(ClassTally(name, tuple(of[0]), tuple(of[1])) for name, of in found.items())


def _by_depth(rows_by_count: Sequence[int]) -> tuple[int, ...]:
    """Rows that accepted a draft at depth 1, 2, …, from rows by the drafts they accepted."""
    return tuple(sum(rows_by_count[depth:]) for depth in range(1, len(rows_by_count)))
