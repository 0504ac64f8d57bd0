"""An executor without a model: it keeps ids where KV would be, and checks every plan it gets.

A place of the pool holds the pair (token, next token) that real KV would have been computed from. A
token is a function of what is read back *through the page table*, so a page that is missing, stale,
freed too early or shared wrongly changes the text or fails a check here.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang.srt.model_executor.step_plan import (
    PAD_PAGE,
    PAD_SLOT,
    ExecutorInfo,
    PrefillChunk,
    SlotAdmission,
    SlotSampling,
    StepKind,
    StepPlan,
    StepResult,
)

Place = tuple[int, int]
POISON: Place = (-1, -1)
REJECTED: Place = (-2, -2)  # written by a row of a draft that was not accepted


@dataclass(frozen=True, slots=True)
class FakeModel:
    """The next token of a history, whatever the mode, the batch or the chunks."""

    vocab_size: int = 40

    def choose(self, ids: Sequence[int], prompt_len: int, sampling: SlotSampling) -> int:
        value = sampling.seed * 7919 + prompt_len
        for token in ids:
            value = (value * 1000003 + token + 1) % 2147483647
        token = (value * 48271 % 2147483647) % self.vocab_size
        if len(ids) - prompt_len < sampling.min_new_tokens:
            while token in sampling.suppressed_ids:
                token = (token + 1) % self.vocab_size
        return token


@dataclass(slots=True)
class FakeSlot:
    admission: SlotAdmission
    seq_len: int
    next_token: int = -1  # -1: still prefilling
    pages: list[int] = field(default_factory=list)
    broken: bool = False

    @property
    def prefill_len(self) -> int:
        return self.admission.prompt_len + len(self.admission.output_ids)


class FakePending:
    def __init__(self, executor: FakeExecutor, plan: StepPlan) -> None:
        self._executor = executor
        self.plan = plan
        self.result: StepResult | None = None

    def wait(self) -> StepResult:
        return self._executor.finish(self)


class FakeExecutor:
    """``lazy``: a step is carried out when it is waited for, as late as a device could."""

    def __init__(
        self, info: ExecutorInfo, model: FakeModel, seed: int = 0, lazy: bool = True, accept: float = 0.7
    ) -> None:
        self._info = info
        self.model = model
        self.lazy = lazy
        self.plans: list[StepPlan] = []
        self.is_free_slot: Callable[[int], bool] = lambda slot: False
        self.accept_counts: deque[int] = deque()  # forced ones, first come first used
        self.fault_slots: list[int] = []  # each faults once, when it next has a row
        self._rng = random.Random(seed)
        self._accept = accept
        self._pool: list[list[Place]] = [[POISON] * info.page_size for _ in range(info.num_pages + 1)]
        self._slots: dict[int, FakeSlot] = {}
        self._outstanding: deque[FakePending] = deque()
        self._planned: dict[int, bool] = {}  # slot -> its last chunk has been launched

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    # ---- the Executor protocol -----------------------------------------------------------------

    def launch(self, plan: StepPlan) -> FakePending:
        self._check_plan(plan)
        self.plans.append(plan)
        pending = FakePending(self, plan)
        self._outstanding.append(pending)
        assert len(self._outstanding) <= 2, "more than two results in flight"
        if not self.lazy:
            pending.result = self._run(plan)
        return pending

    def finish(self, pending: FakePending) -> StepResult:
        assert self._outstanding and self._outstanding[0] is pending, "waited for out of order"
        self._outstanding.popleft()
        return pending.result or self._run(pending.plan)

    def shutdown(self) -> None:
        assert not self._outstanding

    def poison(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._pool[page] = [POISON] * self._info.page_size

    # ---- checks at launch ----------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.step_id == len(self.plans), "step ids count up"
        kinds = {
            (True, False): StepKind.DECODE,
            (False, True): StepKind.PREFILL,
            (True, True): StepKind.MIXED,
        }
        assert plan.kind is kinds[bool(plan.decode_slots), bool(plan.prefill)]
        for admission in plan.admissions:
            self._planned[admission.slot] = False
        rows = [*plan.decode_slots, *(chunk.slot for chunk in plan.prefill)]
        named = rows + [write.slot for write in plan.page_writes]
        assert len(set(rows)) == len(rows), "a slot has two rows"
        for slot in named:
            assert slot != PAD_SLOT and slot in self._planned, f"slot {slot} was never admitted"
            assert not self.is_free_slot(slot), f"slot {slot} has been released"
        assert all(self._planned[slot] for slot in plan.decode_slots), "decoded before its last chunk"
        for chunk in plan.prefill:
            assert not self._planned[chunk.slot] and chunk.token_ids
            self._planned[chunk.slot] = chunk.is_last
        if plan.draft_len:
            spec = self._info.spec
            assert spec is not None and plan.draft_len <= spec.num_steps
            assert len(plan.decode_slots) <= self._info.most_rows(plan.draft_len)
        if plan.row_drafts:
            rows, tokens = len(plan.decode_slots), sum(plan.row_drafts) + len(plan.decode_slots)
            sizes = [s for s in self._info.ragged_sizes if s.draft_len == plan.draft_len and s.rows >= rows]
            # A padded row verifies one token.
            assert any(s.tokens - (s.rows - rows) == tokens for s in sizes), f"no graph of {tokens} tokens"

    # ---- carrying out --------------------------------------------------------------------------

    def _run(self, plan: StepPlan) -> StepResult:
        for admission in plan.admissions:
            self._slots[admission.slot] = FakeSlot(admission, admission.cached_len)
        for write in plan.page_writes:
            pages = self._slots[write.slot].pages
            assert write.start == len(pages) and write.pages, "only what is new, without a gap"
            assert all(PAD_PAGE < page <= self._info.num_pages for page in write.pages)
            pages.extend(write.pages)
            assert len(set(pages)) == len(pages), "a page twice in one row of the table"
        tokens: list[tuple[int, ...]] = []
        faults = []
        rows = zip(plan.decode_slots, plan.decode_len_bounds, plan.drafts_of_rows, strict=True)
        for slot, bound, drafts in rows:
            chosen = self._decode(self._slots[slot], bound, plan.draft_len, drafts)
            faults.append(self._take_fault(slot))
            tokens.append(chosen[: self._rng.randrange(len(chosen))] if faults[-1] else chosen)
        for chunk in plan.prefill:
            chosen = self._prefill(self._slots[chunk.slot], chunk)
            faults.append(self._take_fault(chunk.slot))
            tokens.append(() if faults[-1] else chosen)
        return StepResult(plan.step_id, tuple(tokens), tuple(faults), 0.001, self._used_graph(plan))

    def _used_graph(self, plan: StepPlan) -> bool | None:
        if self._info.device == "cpu" or plan.prefill or not plan.decode_slots:
            return None
        sizes = [graphs.sizes for graphs in self._info.graphs if graphs.draft_len == plan.draft_len]
        return bool(sizes) and len(plan.decode_slots) <= sizes[0][-1]

    def _take_fault(self, slot: int) -> bool:
        if slot in self.fault_slots:
            self.fault_slots.remove(slot)
            self._slots[slot].broken = True
            return True
        return False

    def _prefill(self, slot: FakeSlot, chunk: PrefillChunk) -> tuple[int, ...]:
        assert chunk.start == slot.seq_len, "chunks follow one another"
        end = chunk.start + len(chunk.token_ids)
        assert chunk.is_last == (end == slot.prefill_len) and end <= slot.prefill_len
        ids = self._history(slot) + list(chunk.token_ids)
        if slot.admission.output_ids:
            expected = slot.admission.output_ids[: max(0, end - slot.admission.prompt_len)]
            assert tuple(ids[slot.admission.prompt_len :]) == expected
        after = self._choose(slot, ids) if chunk.is_last else chunk.next_id
        assert after is not None
        self._write(slot, chunk.start, [*chunk.token_ids, after])
        slot.seq_len = end
        if not chunk.is_last:
            return ()
        slot.next_token = after
        return (after,)

    def _decode(self, slot: FakeSlot, bound: int, draft_len: int, drafts: int) -> tuple[int, ...]:
        """``drafts``: that the row verifies; others are made all the same."""
        length = slot.seq_len
        assert length <= bound, f"length {length} is over the bound {bound}"
        spec = self._info.spec
        num_nodes = spec.num_nodes(draft_len) if spec else 1
        assert len(slot.pages) * self._info.page_size >= bound + num_nodes, "pages end before the step does"
        ids = [*self._history(slot), slot.next_token]
        chosen: list[int] = []
        for _ in range(self._num_accepted(slot, drafts) + 1):
            chosen.append(self._choose(slot, ids))
            ids.append(chosen[-1])
        for position in range(length, length + num_nodes):
            self._put(slot, position, REJECTED)
        self._write(slot, length, ids[length:])
        slot.seq_len = length + len(chosen)
        slot.next_token = chosen[-1]
        return tuple(chosen)

    def _num_accepted(self, slot: FakeSlot, draft_len: int) -> int:
        cap = slot.admission.sampling.draft_cap
        most = draft_len if cap is None else min(draft_len, cap)
        if self.accept_counts and draft_len:
            return min(most, self.accept_counts.popleft())
        count = 0
        while count < most and self._rng.random() < self._accept:
            count += 1
        return count

    def _choose(self, slot: FakeSlot, ids: Sequence[int]) -> int:
        return self.model.choose(ids, slot.admission.prompt_len, slot.admission.sampling)

    def _history(self, slot: FakeSlot) -> list[int]:
        """Committed ids, read back through the page table."""
        size = self._info.page_size
        places = [self._pool[slot.pages[at // size]][at % size] for at in range(slot.seq_len)]
        assert slot.broken or all(token >= 0 for token, _ in places), "read a place that is not valid"
        if self._info.spec is not None and not slot.broken:
            following = [token for token, _ in places[1:]]
            if slot.next_token >= 0:
                following.append(slot.next_token)
            pairs = zip(places, following, strict=False)
            assert all(after == token for (_, after), token in pairs), "draft KV made for another token"
        return [token for token, _ in places]

    def _write(self, slot: FakeSlot, start: int, ids: Sequence[int]) -> None:
        """``ids`` has one more than there are places to fill."""
        for offset in range(len(ids) - 1):
            self._put(slot, start + offset, (ids[offset], ids[offset + 1]))

    def _put(self, slot: FakeSlot, position: int, place: Place) -> None:
        size = self._info.page_size
        self._pool[slot.pages[position // size]][position % size] = place
