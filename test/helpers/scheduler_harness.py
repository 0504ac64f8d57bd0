"""A scheduler on a fake executor: sends requests, collects answers, checks who owns every page."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.fake_executor import FakeExecutor, FakeModel

from sglang.srt.managers.io_struct import (
    AbortRequest,
    ControlReply,
    FinishReason,
    FlushCacheRequest,
    GenerateRequest,
    RequestStats,
    SetStateRequest,
    TokenBatch,
    TokenReport,
)
from sglang.srt.managers.metrics import MetricsSink, NullSink
from sglang.srt.managers.request import Request
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_config import SchedulerConfig
from sglang.srt.mem_cache.prefix_cache import NoCache, PrefixCache
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_executor.step_plan import ExecutorInfo, GraphSet, SlotSampling, SpecShape
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.controller import AutoController
from sglang.srt.speculative.toggle import Policy, decide_by_threshold

EOS = 3


def decode(ids: Sequence[int]) -> str:
    """Ids of one to three letters, so that stop strings begin and end inside an id."""
    return "".join("abcdefgh"[token % 8] * (1 + token % 3) for token in ids)


@dataclass
class Answer:
    ids: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_trim: str | None = None
    stats: RequestStats | None = None
    num_outputs: int = 0
    reports: list[TokenReport] = field(default_factory=list)


class SchedulerHarness:
    def __init__(
        self,
        *,
        spec: SpecShape | None = None,
        num_slots: int = 8,
        num_pages: int = 200,
        page_size: int = 1,
        context_len: int = 128,
        max_spec_rows: int | None = None,
        policy: Policy = decide_by_threshold,
        use_cache: bool = True,
        lazy: bool = True,
        seed: int = 0,
        metrics: MetricsSink | None = None,
        graphs: tuple[GraphSet, ...] = (),  # any: a device with CUDA graphs
        auto: AutoController | None = None,
        **config: Any,
    ) -> None:
        self.info = ExecutorInfo(
            num_slots=num_slots,
            num_pages=num_pages,
            page_size=page_size,
            context_len=context_len,
            vocab_size=FakeModel().vocab_size,
            spec=spec,
            max_spec_rows=(num_slots if max_spec_rows is None else max_spec_rows) if spec else 0,
            device="cuda" if graphs else "cpu",
            graphs=graphs,
            draft_lens=_draft_lens(spec, graphs),
        )
        self.model = FakeModel()
        self.executor = FakeExecutor(self.info, self.model, seed=seed, lazy=lazy)
        self.cache: PrefixCache = RadixCache(page_size) if use_cache else NoCache()
        self.sent: dict[str, GenerateRequest] = {}
        self.answers: dict[str, Answer] = {}
        self.replies: list[ControlReply] = []
        self.now = 0.0
        self._names = itertools.count()
        config.setdefault("max_running_requests", num_slots)
        self.scheduler = Scheduler(
            executor=self.executor,
            config=SchedulerConfig(**config),
            policy=policy,
            cache=self.cache,
            decode=decode,
            eos_ids=(EOS,),
            emit=self._collect,
            reply=self.replies.append,
            metrics=metrics or NullSink(),
            clock=self._tick,
            auto=auto,
        )
        self.executor.is_free_slot = self.scheduler.slots.is_free

    def _tick(self) -> float:
        self.now += 0.01
        return self.now

    def _collect(self, batch: TokenBatch) -> None:
        assert batch.outputs
        for output in batch.outputs:
            answer = self.answers.setdefault(output.rid, Answer())
            assert answer.finish is None, f"{output.rid} was answered after its end"
            answer.ids += output.new_ids
            answer.finish, answer.stop_trim, answer.stats = output.finish, output.stop_trim, output.stats
            answer.num_outputs += 1

    # ---- talking to it -------------------------------------------------------------------------

    def send(
        self,
        ids: Sequence[int],
        *,
        stream: bool = False,
        rid: str = "",
        cache_salt: str = "",
        priority: int | None = None,
        **sampling: Any,
    ) -> str:
        rid = rid or f"r{next(self._names)}"
        params = SamplingParams(**{"sampling_seed": 1, "ignore_eos": True, **sampling})
        message = GenerateRequest(
            rid, list(ids), params, stream, received_ts=0.0, cache_salt=cache_salt, priority=priority
        )
        self.sent[rid] = message
        self.scheduler.receive(message)
        return rid

    def abort(self, rid: str) -> None:
        self.scheduler.receive(AbortRequest(rid))

    def abort_all(self) -> None:
        self.scheduler.receive(AbortRequest("", abort_all=True))

    def set_state(self, **server_args: Any) -> ControlReply:
        self.scheduler.receive(SetStateRequest("set", server_args))
        return self.replies[-1]

    def flush_cache(self) -> ControlReply:
        self.scheduler.receive(FlushCacheRequest("flush"))
        return self.replies[-1]

    def state(self) -> dict[str, Any]:
        return self.scheduler.state

    def step(self) -> bool:
        progressed = self.scheduler.step()
        self.check_ownership()
        self.executor.poison(self.scheduler.pages.free_pages())
        return progressed

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler does not come to an end")

    # ---- checks --------------------------------------------------------------------------------

    def holders(self) -> list[Request]:
        """Every request that holds a slot, those that wait for a step in flight included."""
        found = {id(request): request for request in self.scheduler.table.running()}
        step = self.scheduler._in_flight
        if step is not None:
            rows = (*step.planned.decode_requests, *step.planned.prefill_requests)
            found |= {id(request): request for request in rows}
        return list(found.values())

    def check_ownership(self) -> None:
        """Every page has exactly one owner, and every slot one."""
        self.cache.check_integrity()
        owned = self.scheduler.pages.free_pages() + self.cache.owned_pages()
        holders = self.holders()
        for request in holders:
            owned += request.pages[request.num_cache_pages :] + request.duplicate_pages
        assert sorted(owned) == list(range(1, self.info.num_pages + 1)), "a page is lost or owned twice"
        assert self.scheduler.slots.num_free + len(holders) == self.info.num_slots
        assert len({request.slot for request in holders}) == len(holders)
        table = self.scheduler.table
        queued = sum(len(request.ids) for request in (*table.waiting, *table.held.values()))
        filling = sum(r.prefill_len - r.kv_committed_len for r in table.prefilling.values())
        assert table.num_pending_tokens == queued + filling

    def check_end(self) -> None:
        """Nothing is held, and everyone was answered once, with the right text."""
        assert not self.holders() and self.scheduler.table.is_empty
        assert self.scheduler.pages.num_free + self.cache.num_pages == self.info.num_pages
        assert self.cache.num_evictable_pages == self.cache.num_pages
        assert self.scheduler.slots.num_free == self.info.num_slots
        for rid in self.sent:
            self.check_answer(rid)

    def check_answer(self, rid: str) -> None:
        answer = self.answers[rid]
        assert answer.finish is not None, f"{rid} was never answered"
        ids, finish, trim = self.alone(self.sent[rid])
        if answer.finish.type == "abort":
            assert answer.ids == ids[: len(answer.ids)]
            return
        assert answer.ids == ids, f"{rid}: {answer.ids} instead of {ids}"
        assert answer.finish == finish and answer.stop_trim == trim
        assert answer.stats is not None and answer.stats.completion_tokens == len(ids)

    def alone(self, message: GenerateRequest) -> tuple[list[int], FinishReason, str | None]:
        """What plain decode of this request alone gives: an independent, slow re-telling of the rules."""
        params, prompt = message.sampling, message.input_ids
        stops = [*params.stop_token_ids] + ([] if params.ignore_eos else [EOS])
        sampling = SlotSampling(
            seed=params.sampling_seed or 0,
            min_new_tokens=params.min_new_tokens,
            suppressed_ids=tuple(stops) if params.min_new_tokens else (),
        )
        limit = self.info.context_len - len(prompt)
        limit = limit if params.max_new_tokens is None else min(limit, params.max_new_tokens)
        if limit == 0:  # the prompt alone
            return [], FinishReason(type="length", length=0), None
        ids = list(prompt)
        while True:
            before = decode(ids[len(prompt) :])
            token = self.model.choose(ids, len(prompt), sampling)
            ids.append(token)
            outputs = ids[len(prompt) :]
            if len(outputs) >= limit:
                return outputs, FinishReason(type="length", length=len(outputs)), None
            if token in stops and len(outputs) > params.min_new_tokens:
                return outputs, FinishReason(type="stop", matched=token), None
            if len(outputs) < params.min_new_tokens:
                continue
            new = [
                (place, order, stop)
                for order, stop in enumerate(params.stop)
                if (place := _new_match(before, decode(outputs), stop)) >= 0
            ]
            if new:
                matched = min(new)[2]
                trim = None if params.no_stop_trim else matched
                return outputs, FinishReason(type="stop", matched=matched), trim


def _new_match(before: str, after: str, stop: str) -> int:
    """Where a match ends in what ``after`` has more than ``before``; -1: nowhere."""
    return after.find(stop, max(0, len(before) - len(stop) + 1))


def _draft_lens(spec: SpecShape | None, graphs: tuple[GraphSet, ...]) -> tuple[int, ...]:
    if graphs:
        return tuple(captured.draft_len for captured in graphs if captured.draft_len)
    return tuple(range(1, spec.num_steps + 1)) if spec else ()
