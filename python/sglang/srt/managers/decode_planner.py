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

SPARE_TOKENS = 32
"""Places a row gets at a time beyond those of the step: page by page, adding them was more than half of the
host's time of a step."""

SPARE_SHARE = 8
"""Fewer where all of these would be more than this part of the pages that can be had."""

ShortRows = list[tuple[Request, int]]
"""Rows to which a step may have to add pages, with the bounds of their lengths."""


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
    row_drafts: tuple[int, ...]  # where rows have draft lengths of their own; else ()
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
            bounds = [request.kv_len_bound for request in rows]
            short = self._short(rows, bounds)
            plain = self._needs(short, 0)
            if plain.plain <= self._budget.num_available:
                self._budget.make_room(plain.plain)
                return self._fill(rows, bounds, short, self._decide(rows, bounds, short))
            if step_in_flight:
                return Blocked.COMMIT_FIRST
            self._retractor.retract_one()
            blocked = Blocked.PLAN_AGAIN
        return blocked

    def plan_mixed(self) -> DecodeWork | None:
        """Rows to run beside prefill chunks; none if they do not fit (then prefill runs alone)."""
        rows = self._rows()
        bounds = [request.kv_len_bound for request in rows]
        short = self._short(rows, bounds)
        if not rows or self._needs(short, 0).plain > self._budget.num_available:
            return None
        return self._fill(rows, bounds, short, None)

    def _rows(self) -> list[Request]:
        """Not those that the steps in flight bring to their length limit, whatever they accept."""
        decoding = self._table.decoding.values()
        return [request for request in decoding if len(request.ids) + request.num_choosing < request.max_ids]

    def _short(self, rows: list[Request], bounds: list[int]) -> ShortRows:
        """The rows whose pages end before the longest step would: a few of them, in most steps."""
        reach = self._reach[-1]
        return [
            (request, bound)
            for request, bound in zip(rows, bounds, strict=True)
            if bound + reach > request.kv_allocated_len
        ]

    def _needs(self, short: ShortRows, draft_len: int) -> PageNeeds:
        plain = soon = spec = 0
        reach, missing = self._reach[draft_len], self._budget.missing
        for request, bound in short:
            if bound + reach <= request.kv_allocated_len:
                continue
            plain += missing(request, bound + 1)
            spec += missing(request, bound + reach)
            soon += missing(request, max(bound + 1, min(bound + reach, request.final_kv_len)))
        return PageNeeds(plain=plain, soon=soon, spec=spec)

    def _decide(self, rows: list[Request], bounds: list[int], short: ShortRows) -> Decision:
        prepared = self._settings.prepared_lens(len(rows))
        ragged = self._settings.ragged_sizes(len(rows))
        if ragged and any(request.waits_for_host for request in rows):
            ragged = ()  # the host has a say in the choice after every draft
        state = AutoInput(
            num_decoding=len(rows),
            class_counts=_class_counts(rows),
            kv_tokens=sum(bounds),
            num_steps=self._num_steps,
            prepared_lens=prepared,
            fitting_lens=self._fitting(short, prepared) if short else prepared,
            ragged_sizes=ragged,
            rows=rows if ragged else (),
        )
        decision = self._settings.decide(state)
        assert decision.draft_len in (0, *state.fitting_lens), f"the policy chose {decision} for {state}"
        return decision

    def _fitting(self, short: ShortRows, prepared: tuple[int, ...]) -> tuple[int, ...]:
        """The draft lengths whose pages are there: shorter drafts never need more."""
        for count in range(len(prepared), 0, -1):
            if self._spec_fits(self._needs(short, prepared[count - 1])):
                return prepared[:count]
        return ()

    def _spec_fits(self, needs: PageNeeds) -> bool:
        # A page that plain decoding fills too, a few steps later, may be had by eviction. One that only
        # drafts ever touch must be free already: no prefix is evicted for drafts.
        only_drafts = needs.spec - needs.soon
        left_free = max(0, self._budget.num_free - needs.soon)
        return needs.soon <= self._budget.num_available and only_drafts <= left_free

    def _fill(
        self, rows: list[Request], bounds: list[int], short: ShortRows, decision: Decision | None
    ) -> DecodeWork:
        draft_len = decision.draft_len if decision else 0
        return DecodeWork(
            requests=tuple(rows),
            len_bounds=tuple(bounds),
            page_writes=self._add_pages(short, draft_len) if short else (),
            draft_len=draft_len,
            row_drafts=decision.row_drafts if decision else (),
            decision=decision,
        )

    def _add_pages(self, short: ShortRows, draft_len: int) -> tuple[PageWrite, ...]:
        """What the step needs, and more that its rows are going to fill, so that the next steps add nothing.

        Old prefixes may be evicted for what plain decoding fills too, but not for what only drafts touch.
        """
        reach, needs, budget = self._reach[draft_len], self._needs(short, draft_len), self._budget
        wanted = [(r, bound + reach) for r, bound in short if bound + reach > r.kv_allocated_len]
        count = needs.soon if draft_len else needs.plain
        room = budget.num_available * budget.page_size // (SPARE_SHARE * max(1, len(wanted)))
        if needs.spec == needs.soon and room:
            spare = min(SPARE_TOKENS, room)
            ample = [(r, max(kv_len, min(kv_len + spare, r.final_kv_len))) for r, kv_len in wanted]
            ample_count = sum(budget.missing(request, kv_len) for request, kv_len in ample)
            if ample_count <= budget.num_available:
                wanted, count = ample, ample_count
        budget.make_room(count)
        added = [budget.extend(request, kv_len) for request, kv_len in wanted]
        return tuple(write for write in added if write is not None)


def _class_counts(rows: list[Request]) -> tuple[tuple[str, int], ...]:
    """Rows of each class; those that accept no draft are in none."""
    counts = Counter([request.draft_class for request in rows])
    del counts[""]
    return tuple(counts.items())
