"""Prefill side of a plan: go on with chunks, then admit from the front of the queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.srt.managers.finish import Finisher, pool_is_full
from sglang.srt.managers.page_budget import PageBudget
from sglang.srt.managers.request import Request
from sglang.srt.managers.request_table import RequestTable
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.prefix_cache import CacheHandle, PrefixCache, PrefixMatch, prefix_keys
from sglang.srt.mem_cache.slot_allocator import SlotAllocator
from sglang.srt.model_executor.step_plan import PageWrite, PrefillChunk, SlotAdmission


@dataclass(slots=True)
class PrefillWork:
    """Part of one plan, while it is being put together."""

    requests: list[Request] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)
    admissions: list[SlotAdmission] = field(default_factory=list)
    page_writes: list[PageWrite] = field(default_factory=list)

    def add_chunk(self, request: Request, count: int) -> None:
        start = request.kv_len_bound
        end = start + count
        next_id = request.ids[end] if end < request.prefill_len else None
        self.requests.append(request)
        self.chunks.append(PrefillChunk(request.slot, start, tuple(request.ids[start:end]), next_id))


class PrefillPlanner:
    def __init__(
        self,
        table: RequestTable,
        budget: PageBudget,
        slots: SlotAllocator,
        cache: PrefixCache,
        finisher: Finisher,
        config: SchedulerConfig,
        has_drafter: bool,
        wants_ids: bool = False,
    ) -> None:
        """``wants_ids``: see ``ExecutorInfo``."""
        self._table = table
        self._budget = budget
        self._slots = slots
        self._cache = cache
        self._finisher = finisher
        self._config = config
        self._has_drafter = has_drafter
        self._wants_ids = wants_ids

    def plan(self, num_tokens: int) -> PrefillWork:
        """Prefill up to ``num_tokens`` tokens, first come first served."""
        work = PrefillWork()
        for request in self._table.prefilling.values():
            num_tokens -= self._add_chunk(work, request, num_tokens)
        if not self._table.waiting:
            return work
        reserve = sum(self._decode_reserve(request) for request in self._table.running())
        while num_tokens > 0 and self._table.waiting:
            request = self._table.waiting[0]
            if not self._fits_whole(request, num_tokens, is_first=not work.chunks):
                break
            if self._fails_for_ever(request):
                continue
            if not self._admit(work, request, reserve):
                break
            reserve += self._decode_reserve(request)
            num_tokens -= self._add_chunk(work, request, num_tokens)
        return work

    def _add_chunk(self, work: PrefillWork, request: Request, num_tokens: int) -> int:
        left = request.prefill_len - request.kv_len_bound
        count = min(left, num_tokens) if self._config.chunks_prompts else left
        if count > 0:
            work.add_chunk(request, count)
        return max(0, count)

    def _fits_whole(self, request: Request, num_tokens: int, is_first: bool) -> bool:
        return is_first or self._config.chunks_prompts or len(request.ids) <= num_tokens

    def _fails_for_ever(self, request: Request) -> bool:
        """A retracted request may have outgrown the pool (a new one is checked on arrival)."""
        if self._budget.pages_for(len(request.ids)) <= self._budget.num_total:
            return False
        self._finisher.finish(request, pool_is_full(request, self._budget.token_capacity))
        return True

    def _decode_reserve(self, request: Request) -> int:
        """Pages to leave for a running request's next tokens, so that admitting does not mean retracting."""
        left = request.max_new_tokens - request.num_outputs
        return self._budget.pages_for(min(left, self._config.decode_reserve_tokens))

    def _admit(self, work: PrefillWork, request: Request, reserve: int) -> bool:
        if self._slots.num_free == 0 or self._table.num_running >= self._config.max_running_requests:
            return False
        match = self._match(request)
        handle = self._cache.lock(match)  # before counting: a page that is hit is not one to evict
        if self._table.num_running:
            reserve += self._decode_reserve(request)
        num_pages = self._budget.pages_for(len(request.ids)) - len(match.pages)
        if num_pages + reserve > self._budget.num_available:
            self._cache.unlock(handle)
            return False
        self._enter(work, request, match, handle)
        return True

    def has_room(self, request: Request, leaving: Sequence[Request] = ()) -> bool:
        """Whether it could be admitted, if these running requests gave back what they hold."""
        staying = [other for other in self._table.running() if other not in leaving]
        if len(staying) >= self._config.max_running_requests or not self._slots.num_free + len(leaving):
            return False
        match = self._match(request)
        handle = self._cache.lock(match)
        room = self._available_without(leaving)
        self._cache.unlock(handle)
        num_pages = self._budget.pages_for(len(request.ids)) - len(match.pages)
        if staying:
            num_pages += sum(self._decode_reserve(other) for other in (*staying, request))
        return num_pages <= room

    def _available_without(self, leaving: Sequence[Request]) -> int:
        """What the cache holds for several is there when the last of them has left."""
        own = 0
        for other in leaving:
            assert other.cache_handle is not None
            self._cache.unlock(other.cache_handle)
            own += len(other.pages) - other.num_cache_pages + len(other.duplicate_pages)
        available = self._budget.num_available + own
        for other in leaving:
            assert other.cache_handle is not None
            self._cache.lock_again(other.cache_handle)
        return available

    def _match(self, request: Request) -> PrefixMatch:
        if request.match_keys is None:
            # All ids but the last, which is always computed: it gives the first choice (and with a
            # drafter it has no pair).
            count = len(request.ids) - 1
            first_needed = None if request.report is None else request.report.first_needed
            if first_needed is not None:
                count = min(count, first_needed)
            request.match_keys = prefix_keys(request.ids, count, self._has_drafter)
        return self._cache.match(request.match_keys, request.salt)

    def _enter(self, work: PrefillWork, request: Request, match: PrefixMatch, handle: CacheHandle) -> None:
        page_size = self._budget.page_size
        admitted = self._table.admit_front()
        assert admitted is request
        request.match_keys = None
        request.slot = self._slots.allocate()
        request.prefill_len = len(request.ids)
        request.cache_handle = handle
        request.pages = list(match.pages)
        request.num_cache_pages = len(match.pages)
        cached_len = len(match.pages) * page_size
        request.kv_allocated_len = request.kv_committed_len = request.kv_len_bound = cached_len
        if request.counters.num_retractions == 0:
            request.counters.cached_tokens = cached_len
        if match.pages:
            work.page_writes.append(PageWrite(request.slot, 0, match.pages))
        self._budget.make_room(self._budget.missing(request, request.prefill_len))
        added = self._budget.extend(request, request.prefill_len)
        if added is not None:
            work.page_writes.append(added)
        work.admissions.append(
            SlotAdmission(
                slot=request.slot,
                prompt_len=request.prompt_len,
                cached_len=cached_len,
                sampling=request.sampling,
                output_ids=tuple(request.ids[request.prompt_len :]),
                known_ids=tuple(request.ids[: cached_len + 1]) if self._wants_ids else (),
                processor=request.processor,
            )
        )
