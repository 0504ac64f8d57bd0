"""Drive an executor by hand: prefill prompts, then steps of any mode, without a scheduler.

Pages are handed out one slot at a time in a shuffled order, so that neighbours in a sequence are no
neighbours in the pool.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from sglang.srt.model_executor.in_process_executor import InProcessExecutor
from sglang.srt.model_executor.step_plan import (
    PageWrite,
    PrefillChunk,
    SlotAdmission,
    SlotSampling,
    StepKind,
    StepPlan,
    StepResult,
)

GREEDY = SlotSampling(temperature=0.0)


@dataclass
class DrivenRequest:
    slot: int
    prompt: list[int]
    sampling: SlotSampling = GREEDY
    output: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)  # tokens of each decode step
    faulty: bool = False
    untold_bound: int = 0  # tokens that the device may have put out beyond a fault

    @property
    def known(self) -> list[int]:
        return self.prompt + self.output

    @property
    def seq_len(self) -> int:
        """L: committed tokens, after the prefill."""
        return len(self.prompt) + len(self.output) - 1


class PlanDriver:
    """Requests live in slots 1, 2, … ; each step covers those asked for.

    ``poison``: pages are NaN until they are written and after they are given back, so whoever reads
    a place it must not read is found out.
    """

    def __init__(self, executor: InProcessExecutor, page_seed: int = 0, poison: bool = True) -> None:
        self.executor = executor
        self.poison = poison
        self.info = executor.info
        self.free_pages = list(range(1, self.info.num_pages + 1))
        random.Random(page_seed).shuffle(self.free_pages)
        self.free_slots = list(range(self.info.num_slots, 0, -1))
        self.step_id = 0
        self._poison(self.free_pages)

    def add(self, prompt: Sequence[int], sampling: SlotSampling = GREEDY, chunk: int = 0) -> DrivenRequest:
        """Admit a prompt and run its prefill, ``chunk`` tokens a step (0: at once)."""
        request = DrivenRequest(self.free_slots.pop(), list(prompt), sampling)
        for plan in self.prefill_plans(request, chunk):
            self.run(plan, [request])
        return request

    def prefill_plans(self, request: DrivenRequest, chunk: int = 0) -> Iterable[StepPlan]:
        """The steps of a prefill of all known ids (a request that comes back has outputs too)."""
        known = request.known
        for start in range(0, len(known), chunk or len(known)):
            yield self.plan(prefill=[(request, start, min(start + (chunk or len(known)), len(known)))])

    def plan(
        self,
        decode: Sequence[DrivenRequest] = (),
        draft_len: int = 0,
        prefill: Sequence[tuple[DrivenRequest, int, int]] = (),  # request, start, end
        row_drafts: tuple[int, ...] = (),
    ) -> StepPlan:
        """One step; chunks that start at 0 admit their slot. Pages are taken as needed."""
        admissions, writes, chunks = [], [], []
        for request, start, end in prefill:
            known = request.known
            if start == 0:
                assert not request.pages
                outputs = tuple(request.output)
                admissions.append(
                    SlotAdmission(
                        request.slot, len(request.prompt), 0, request.sampling, outputs, tuple(known[:1])
                    )
                )
            writes += self._grow(request, end)
            next_id = known[end] if end < len(known) else None
            chunks.append(PrefillChunk(request.slot, start, tuple(known[start:end]), next_id))
        nodes = self.info.spec.num_nodes(draft_len) if self.info.spec else 1
        for request in decode:
            writes += self._grow(request, request.seq_len + request.untold_bound + max(nodes, draft_len + 1))
        kinds = {
            (True, False): StepKind.DECODE,
            (False, True): StepKind.PREFILL,
            (True, True): StepKind.MIXED,
        }
        self.step_id += 1
        return StepPlan(
            step_id=self.step_id,
            kind=kinds.get((bool(decode), bool(prefill)), StepKind.IDLE),
            decode_slots=tuple(r.slot for r in decode),
            decode_len_bounds=tuple(r.seq_len + r.untold_bound for r in decode),
            draft_len=draft_len,
            row_drafts=row_drafts,
            prefill=tuple(chunks),
            admissions=tuple(admissions),
            page_writes=tuple(writes),
        )

    def run(self, plan: StepPlan, requests: Sequence[DrivenRequest]) -> StepResult:
        """Launch, wait, and give every row's tokens to its request (decode rows first)."""
        result = self.executor.launch(plan).wait()
        for row, request in enumerate(requests):
            request.output += result.tokens[row]
            if result.faults[row]:
                request.faulty = True
                request.untold_bound += plan.draft_len + 1
            if row < len(plan.decode_slots):
                request.counts.append(len(result.tokens[row]))
        return result

    def step(self, requests: Sequence[DrivenRequest], draft_len: int = 0) -> StepResult:
        """One decode step of these requests."""
        return self.run(self.plan(decode=requests, draft_len=draft_len), requests)

    def generate(
        self, requests: Sequence[DrivenRequest], num_tokens: int, draft_len: Callable[[], int] | int = 0
    ) -> list[list[int]]:
        """Step until every request has ``num_tokens`` outputs; returns exactly that many of each."""
        while running := [r for r in requests if len(r.output) < num_tokens]:
            self.step(running, draft_len() if callable(draft_len) else draft_len)
        return [r.output[:num_tokens] for r in requests]

    def release(self, request: DrivenRequest) -> None:
        """Give slot and pages back."""
        self._poison(request.pages)
        self.free_pages += request.pages
        self.free_slots.append(request.slot)
        request.pages = []

    def reserve(self, request: DrivenRequest, num_places: int) -> None:
        """Make the pages reach ``num_places`` tokens, with a step that runs nothing."""
        self.step_id += 1
        writes = tuple(self._grow(request, num_places))
        self.executor.launch(StepPlan(self.step_id, StepKind.IDLE, page_writes=writes)).wait()

    def _poison(self, pages: Sequence[int]) -> None:
        if self.poison:
            for pool in self.executor.worker.pools:
                pool.poison(pages)

    def _grow(self, request: DrivenRequest, num_places: int) -> list[PageWrite]:
        have = len(request.pages)
        need = -(-num_places // self.info.page_size) - have
        if need <= 0:
            return []
        new = [self.free_pages.pop() for _ in range(need)]
        request.pages += new
        return [PageWrite(request.slot, have, tuple(new))]
