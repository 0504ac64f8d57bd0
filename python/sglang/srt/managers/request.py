"""Host truth of one request.

Three lengths, which never stand for each other: ``kv_committed_len`` (positions the device is known
to have filled), ``kv_len_bound`` (what the steps in flight may make of it) and
``kv_allocated_len`` (what its pages could hold). Ids are known one step late under overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from sglang.srt.constrained.constraint import Constraint
from sglang.srt.constrained.grammar import spec_of
from sglang.srt.managers.io_struct import FinishReason, GenerateRequest, RequestStats
from sglang.srt.managers.reports import RequestReport
from sglang.srt.mem_cache.prefix_cache import CacheHandle
from sglang.srt.model_executor.step_plan import ProcessorSpec, SlotSampling
from sglang.srt.utils.stop_regex import StopSearch


class RequestState(StrEnum):
    HELD = "held"  # its grammar is being compiled
    WAITING = "waiting"  # no slot, no pages
    PREFILL = "prefill"  # admitted; some known ids are not in a planned chunk yet
    DECODE = "decode"  # its last chunk has been planned
    FINISHED = "finished"  # answered; slot and pages may still wait for a step in flight


@dataclass(slots=True)
class RequestCounters:
    cached_tokens: int = 0  # prefix hit of the first admission
    num_retractions: int = 0
    decode_steps_plain: int = 0
    decode_steps_spec: int = 0
    spec_tokens: int = 0
    spec_num_correct_drafts: int = 0
    spec_num_proposed_drafts: int = 0
    spec_correct_drafts_histogram: list[int] = field(default_factory=list)
    admitted_ts: float | None = None  # the first time
    first_token_ts: float | None = None

    def count_speculative(self, num_kept: int, num_correct: int, num_proposed: int) -> None:
        self.decode_steps_spec += 1
        self.spec_tokens += num_kept
        self.spec_num_correct_drafts += num_correct
        self.spec_num_proposed_drafts += num_proposed
        histogram = self.spec_correct_drafts_histogram
        if num_correct >= len(histogram):
            histogram.extend([0] * (num_correct + 1 - len(histogram)))
        histogram[num_correct] += 1


class Request:
    """Fields are grouped by the module that writes them."""

    __slots__ = (
        "rid", "name", "params", "stream", "arrival", "prompt_len", "max_new_tokens", "sampling", "stop_ids",
        "draft_class",
        "state", "slot", "prefill_len", "pages", "kv_allocated_len", "cache_handle", "num_cache_pages",
        "duplicate_pages", "match_keys", "num_in_flight", "num_choosing", "kv_len_bound", "ids",
        "kv_committed_len", "counters", "finish", "stop_trim", "num_emitted", "max_ids", "grammar",
        "reasoning_end", "constraint", "received_ts", "stop_search", "rules", "salt", "priority",
        "processor", "report",
    )  # fmt: skip

    def __init__(
        self,
        message: GenerateRequest,
        arrival: int,
        max_new_tokens: int,
        sampling: SlotSampling,
        stop_ids: frozenset[int],
        name: str = "",
        draft_class: str = "",
        scales_logprobs: bool = True,
        priority: int = 0,
    ) -> None:
        # -- receive (intake.py): never changes
        self.rid = message.rid
        self.name = name or message.rid  # by which its client knows it
        self.params = message.sampling
        self.stream = message.stream
        self.received_ts = message.received_ts
        self.arrival = arrival  # order of arrival
        self.prompt_len = len(message.input_ids)
        self.max_new_tokens = max_new_tokens  # already within the context
        self.max_ids = self.prompt_len + max_new_tokens
        self.sampling = sampling
        self.stop_ids = stop_ids
        patterns = message.sampling.stop_regex
        self.stop_search = StopSearch(patterns) if patterns else None  # stop_checker.py's
        self.draft_class = draft_class  # requests that accept drafts alike; "": accepts none
        self.grammar = spec_of(message.sampling)
        self.reasoning_end = message.reasoning_end  # where the grammar begins; None: at once
        self.rules = message.rules
        params = message.sampling.custom_params or "{}"
        text = message.processor
        self.processor = None if text is None else ProcessorSpec(text, params, self.name)
        self.salt = message.cache_salt.encode()  # of its pages in the prefix cache
        self.priority = priority  # higher ones go first
        # -- grammars.py
        self.constraint: Constraint | None = None  # how far its text has come in grammar and rules
        # -- admission.py and release.py: what it holds
        self.state = RequestState.WAITING
        self.slot = 0
        self.prefill_len = 0  # known ids at admission: the prefill covers these
        self.pages: list[int] = []
        self.kv_allocated_len = 0
        self.cache_handle: CacheHandle | None = None
        self.num_cache_pages = 0  # the first so many of ``pages`` are the cache's or have a duplicate there
        self.duplicate_pages: list[int] = []  # own pages among those, because the cache had its own already
        self.match_keys: np.ndarray | None = None  # while it waits: keys of all known ids but the last
        # -- planner.py adds, commit.py takes away; release.py ends both
        self.num_in_flight = 0  # launched steps that have a row of it
        self.num_choosing = 0  # of these, steps out of which at least one token comes
        self.kv_len_bound = 0  # the committed length after all of them, at most (exact while prefilling)
        # -- commit.py
        self.ids = list(message.input_ids)
        self.kv_committed_len = 0
        self.counters = RequestCounters()
        wish, heat = message.wish, sampling.temperature if scales_logprobs else 0.0
        self.report = None if wish is None else RequestReport(wish, self.prompt_len, heat)
        # -- finish.py
        self.finish: FinishReason | None = None
        self.stop_trim: str | None = None
        # -- outputs.py
        self.num_emitted = 0

    @property
    def num_outputs(self) -> int:
        return len(self.ids) - self.prompt_len

    @property
    def final_kv_len(self) -> int:
        """Places it fills if it runs to its length limit: the last id is never computed."""
        return self.max_ids - 1

    @property
    def draft_cap(self) -> int | None:
        return self.sampling.draft_cap

    def max_accepted(self, draft_len: int) -> int:
        """Most drafts that its row can accept in a step of ``draft_len``."""
        cap = self.sampling.draft_cap
        return draft_len if cap is None or cap > draft_len else cap

    @property
    def waits_for_host(self) -> bool:
        """Whether what its row chooses depends on what the host says in the middle of a step."""
        return self.constraint is not None or self.processor is not None

    def stats(self) -> RequestStats:
        counters = self.counters
        return RequestStats(
            prompt_tokens=self.prompt_len,
            completion_tokens=self.num_outputs,
            cached_tokens=counters.cached_tokens,
            num_retractions=counters.num_retractions,
            decode_steps_plain=counters.decode_steps_plain,
            decode_steps_spec=counters.decode_steps_spec,
            spec_tokens=counters.spec_tokens,
            spec_verify_ct=counters.decode_steps_spec,
            spec_num_correct_drafts=counters.spec_num_correct_drafts,
            spec_num_proposed_drafts=counters.spec_num_proposed_drafts,
            spec_correct_drafts_histogram=counters.spec_correct_drafts_histogram[:],
            admitted_ts=counters.admitted_ts,
            first_token_ts=counters.first_token_ts,
        )
