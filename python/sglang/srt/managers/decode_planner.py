"""Decode side of a plan: which rows, which mode, and the pages for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from sglang.srt.managers.page_budget import PageBudget
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.retraction import Retractor
from sglang.srt.managers.toggle_settings import ToggleSettings
from sglang.srt.model_executor.step_plan import PageWrite, SpecShape
from sglang.srt.speculative.auto import AutoInput
from sglang.srt.speculative.toggle import Decision


class Blocked(StrEnum):
    """Why there is no plan."""

    NOTHING_TO_RUN = "nothing_to_run"
    PLAN_AGAIN = "plan_again"  # the last running request gave up its pages: others can be admitted now
    COMMIT_FIRST = "commit_first"  # pages are short by the bounds; exact lengths or freed pages may do


@dataclass(frozen=True, slots=True)
class DecodeWork:
    requests: tuple[Request, ...]
    len_bounds: tuple[int, ...]
    page_writes: tuple[PageWrite, ...]
    draft_len: int
    decision: Decision | None  # None: rows of a mixed step, which is always plain


@dataclass(frozen=True, slots=True)
class PageNeeds:
    """Pages to add for a step over all its rows."""

    plain: int
    soon: int  # for a speculative step, as far as the requests will get there anyway
    spec: int  # for a speculative step


class DecodePlanner:
    def __init__(
        self,
        table: RequestTable,
        budget: PageBudget,
        retractor: Retractor,
        settings: ToggleSettings,
        spec: SpecShape | None,
    ) -> None:
        self._table = table
        self._budget = budget
        self._retractor = retractor
        self._settings = settings
        self._num_steps = spec.num_steps if spec else 0
        # Places that a row writes, by draft length.
        self._reach = [spec.num_nodes(k) if spec else 1 for k in range(self._num_steps + 1)]

    def plan(self, step_in_flight: bool) -> DecodeWork | Blocked:
        blocked = Blocked.NOTHING_TO_RUN
        while rows := self._rows():
            bounds = tuple(request.kv_len_bound for request in rows)
            plain = self._needs(rows, bounds, 0)
            if plain.plain <= self._budget.num_available:
                self._budget.make_room(plain.plain)
                return self._fill(rows, bounds, self._decide(rows, bounds))
            if step_in_flight:
                return Blocked.COMMIT_FIRST
            self._retractor.retract_one()
            blocked = Blocked.PLAN_AGAIN
        return blocked

    def plan_mixed(self) -> DecodeWork | None:
        """Rows to run beside prefill chunks; none if they do not fit (then prefill runs alone)."""
        rows = self._rows()
        bounds = tuple(request.kv_len_bound for request in rows)
        if not rows or self._needs(rows, bounds, 0).plain > self._budget.num_available:
            return None
        return self._fill(rows, bounds, None)

    def _rows(self) -> list[Request]:
        return [request for request in self._table.decoding.values() if not request.surely_finishes]

    def _needs(self, rows: list[Request], bounds: tuple[int, ...], draft_len: int) -> PageNeeds:
        plain = soon = spec = 0
        ahead = self._reach[draft_len]
        for request, bound in zip(rows, bounds, strict=True):
            if bound + ahead <= request.kv_allocated_len:
                continue
            plain += self._budget.missing(request, bound + 1)
            spec += self._budget.missing(request, bound + ahead)
            soon += self._budget.missing(request, max(bound + 1, min(bound + ahead, request.final_kv_len)))
        return PageNeeds(plain=plain, soon=soon, spec=spec)

    def _decide(self, rows: list[Request], bounds: tuple[int, ...]) -> Decision:
        prepared = self._settings.prepared_lens(len(rows))
        state = AutoInput(
            num_decoding=len(rows),
            class_counts=_class_counts(rows),
            kv_tokens=sum(bounds),
            num_steps=self._num_steps,
            prepared_lens=prepared,
            fitting_lens=self._fitting(rows, bounds, prepared),
        )
        decision = self._settings.decide(state)
        assert decision.draft_len in (0, *state.fitting_lens), f"the policy chose {decision} for {state}"
        return decision

    def _fitting(
        self, rows: list[Request], bounds: tuple[int, ...], prepared: tuple[int, ...]
    ) -> tuple[int, ...]:
        """The draft lengths whose pages are there: shorter drafts never need more."""
        for count in range(len(prepared), 0, -1):
            if self._spec_fits(self._needs(rows, bounds, prepared[count - 1])):
                return prepared[:count]
        return ()

    def _spec_fits(self, needs: PageNeeds) -> bool:
        # A page that plain decoding fills too, a few steps later, may be had by eviction. One that only
        # drafts ever touch must be free already: no prefix is evicted for drafts.
        only_drafts = needs.spec - needs.soon
        left_free = max(0, self._budget.num_free - needs.soon)
        return needs.soon <= self._budget.num_available and only_drafts <= left_free

    def _fill(self, rows: list[Request], bounds: tuple[int, ...], decision: Decision | None) -> DecodeWork:
        draft_len = decision.draft_len if decision else 0
        ahead, needs = self._reach[draft_len], self._needs(rows, bounds, draft_len)
        self._budget.make_room(needs.soon if draft_len else needs.plain)  # not for what drafts add
        added = [
            self._budget.extend(request, bound + ahead) for request, bound in zip(rows, bounds, strict=True)
        ]
        return DecodeWork(
            requests=tuple(rows),
            len_bounds=bounds,
            page_writes=tuple(write for write in added if write is not None),
            draft_len=draft_len,
            decision=decision,
        )


def _class_counts(rows: list[Request]) -> tuple[tuple[str, int], ...]:
    """Rows of each class; those that accept no draft are in none."""
    return tuple(Counter(request.draft_class for request in rows if request.draft_class).items())
