"""Between the endpoints and the scheduler: text to ids, checks, and which answer belongs to whom.

Runs in the server's own process, in one asyncio loop. Everything here is called from that loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sglang.srt.managers.io_struct import (
    AbortByRid,
    AbortRequest,
    ContinueRequest,
    ControlReply,
    FinishReason,
    FlushCacheRequest,
    GenerateRequest,
    GetStateRequest,
    HoldRequests,
    PauseRequest,
    RequestWish,
    SetStateRequest,
    TextBatch,
    TextOutput,
    ToPeer,
    ToScheduler,
    rid_in_use,
)
from sglang.srt.managers.text_budget import HiddenBudget
from sglang.srt.managers.text_observers import TextObserver
from sglang.srt.managers.text_reports import TextReport
from sglang.srt.managers.text_request import Group, RequestError, Sample, TextRequest
from sglang.srt.managers.text_rules import choice_rules
from sglang.srt.sampling.sampling_params import ChoiceRules, SamplingParams
from sglang.srt.utils.text_tokenizer import TextTokenizer

_SEED_BITS = 63
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")
_TOO_LONG = "context_length_exceeded"  # OpenAI's word
MOST_PROMPT_LOGPROBS = 4 << 20
"""Of ids beside a prompt's own: half a gigabyte here, and a second in which no other request goes on."""
_TOKENIZE_IN_THREAD = 4000  # characters: from here on it would hold up other requests


class Peers:
    """The other processes that answer clients: none."""

    prefix = ""  # of the ids by which other processes know what this one asked for

    def tell(self, message: ToPeer) -> None:
        return None


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits, as the scheduler has said."""

    context_len: int
    max_total_num_tokens: int  # in the KV cache
    vocab_size: int
    hidden_size: int = 0  # numbers of a hidden state, where requests may ask for them


class TokenizerManager:
    def __init__(
        self,
        tokenizer: TextTokenizer,
        limits: Limits,
        send: Callable[[ToScheduler | GetStateRequest], None],
        observer: TextObserver,
        random_seed: int | None,
        peers: Peers | None = None,
    ) -> None:
        """``peers``: where several processes answer clients."""
        self.tokenizer = tokenizer
        self.limits = limits
        self.failure: str | None = None  # set when the server can't go on
        self.closing: str | None = None  # set when it takes no more requests, and ends those it has
        self.last_output_ts = 0.0
        self._send = send
        self._hidden = HiddenBudget(limits.hidden_size)
        self._observer = observer
        self._peers = peers or Peers()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._seeds = random.Random(random_seed)
        self._samples: dict[str, Sample] = {}
        self._replies: dict[str, asyncio.Future[ControlReply]] = {}

    # ---- requests

    async def submit(self, requests: Sequence[TextRequest]) -> Group:
        """Start every sample of ``requests``, or none.

        Raises:
            RequestError: one of them can't be served.
        """
        self._refuse_if_closing()
        prompts = [await self.tokenize(request) for request in requests]
        await self._resumed.wait()
        self._refuse_if_closing()
        group = Group()
        new: list[tuple[Sample, SamplingParams, ChoiceRules | None]] = []
        for request, ids in zip(requests, prompts, strict=True):
            rules = choice_rules(request, self.tokenizer, self.limits.vocab_size)
            new += [(*sample, rules) for sample in self._expand(request, ids, group)]
        self._check_rids([sample.rid for sample, _, _ in new])
        self._hidden.take([(sample, sampling.max_new_tokens or 0) for sample, sampling, _ in new])
        for sample, sampling, rules in new:
            self._samples[self._wire_id(sample)] = sample
            group.samples.append(sample)
            self._observer.received(sample)
            asked = sample.request
            self._send(
                GenerateRequest(
                    self._wire_id(sample),
                    sample.prompt_ids,
                    sampling,
                    asked.stream,
                    sample.created_ts,
                    asked.reasoning_end,
                    rules,
                    wish=asked.wish,
                    processor=asked.processor,
                    cache_salt=asked.cache_salt,
                    priority=asked.priority,
                )
            )
        return group

    def abort(self, rid: str, reason: str) -> None:
        """End the sample, the samples of the request, or all of the call ``rid``; unknown ones have ended."""
        self._abort_own(rid, reason)
        self._peers.tell(AbortByRid(rid, reason))

    def _abort_own(self, rid: str, reason: str) -> None:
        for sample in list(self._samples.values()):
            if rid in (sample.rid, sample.request.rid, sample.request.call_rid):
                self._send(AbortRequest(self._wire_id(sample), reason=reason))

    def abort_group(self, group: Group, reason: str) -> None:
        for sample in group.samples:
            if sample.finish is None:
                self._send(AbortRequest(self._wire_id(sample), reason=reason))

    def abort_all(self, reason: str) -> None:
        self._send(AbortRequest("", abort_all=True, reason=reason))

    def _expand(
        self, request: TextRequest, ids: list[int], group: Group
    ) -> list[tuple[Sample, SamplingParams]]:
        sampling = self._fit(request.sampling, ids)
        self._check_wish(request.wish, ids)
        base = request.rid or uuid.uuid4().hex
        if sampling.n == 1:
            seed = sampling.sampling_seed
            seed = self._seeds.getrandbits(_SEED_BITS) if seed is None else seed
            return [(self._sample(base, request, ids, group), sampling.for_sample(seed))]
        return [
            (
                self._sample(f"{base}_{i}", request, ids, group),
                sampling.for_sample(self._seed_of(sampling, i)),
            )
            for i in range(sampling.n)
        ]

    def _sample(self, rid: str, request: TextRequest, ids: list[int], group: Group) -> Sample:
        if request.wish is None:
            return Sample(rid, request, ids, group.changed)
        text_of = self.tokenizer.token_text if request.logprob_texts else _no_text
        return Sample(rid, request, ids, group.changed, TextReport(request.wish, ids, text_of))

    def _check_wish(self, wish: RequestWish | None, ids: list[int]) -> None:
        if wish is None:
            return
        vocab_size = self.limits.vocab_size
        wrong = next((i for i in wish.token_ids or () if not 0 <= i < vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token_ids_logprob: id {wrong} is outside the vocabulary (0 to {vocab_size - 1})"
            )
        if wish.num_top > vocab_size:
            raise RequestError(f"more logprobs are wanted than the vocabulary has tokens ({vocab_size})")
        if wish.logprob_start > len(ids):
            raise RequestError(
                f"logprob_start_len ({wish.logprob_start}) is more than the prompt's tokens ({len(ids)})"
            )
        places = len(ids) - wish.logprob_start if wish.logprob_start >= 0 else 0
        others = wish.num_top + len(wish.token_ids or ())
        if places * others > MOST_PROMPT_LOGPROBS:
            raise RequestError(
                f"log-probabilities of {others} ids at each of {places} places of the prompt are more than"
                f" {MOST_PROMPT_LOGPROBS}: ask for fewer ids (top_logprobs_num, token_ids_logprob), or of a"
                " shorter part (logprob_start_len)"
            )
        if wish.hidden_states and not self.limits.hidden_size:
            raise RequestError(
                "return_hidden_states is for servers started with --enable-return-hidden-states"
            )

    def _seed_of(self, sampling: SamplingParams, index: int) -> int:
        if sampling.sampling_seed is None:
            return self._seeds.getrandbits(_SEED_BITS)
        return sample_seed(sampling.sampling_seed, index)

    async def tokenize(self, request: TextRequest) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, str) and _LONE_SURROGATE.search(prompt):
            raise RequestError("the prompt is not valid Unicode: it has a lone surrogate")
        if isinstance(prompt, str):
            # Megabytes would take seconds to tokenise, and hold up everybody else.
            self._refuse_too_long(self.tokenizer.least_tokens(prompt), "at least ")
        if not isinstance(prompt, str):
            ids = prompt
        elif len(prompt) < _TOKENIZE_IN_THREAD:
            ids = self.tokenizer.encode(prompt, request.add_special_tokens)
        else:
            ids = await asyncio.to_thread(self.tokenizer.encode, prompt, request.add_special_tokens)
        if not ids:
            raise RequestError("the prompt is empty: give at least one token")
        wrong = next((i for i in ids if not 0 <= i < self.limits.vocab_size), None)
        if wrong is not None:
            raise RequestError(
                f"token id {wrong} is outside the vocabulary (0 to {self.limits.vocab_size - 1})"
            )
        return ids

    def _refuse_too_long(self, num_tokens: int, qualifier: str = "") -> None:
        context = self.limits.context_len
        most = min(context, self.limits.max_total_num_tokens)
        if num_tokens >= most:
            what = "This model's maximum context length is" if most == context else "The KV cache holds"
            raise RequestError(
                f"{what} {most} tokens, and the input has {qualifier}{num_tokens} tokens: shorten it"
                " (at least one token is needed for the answer)",
                code=_TOO_LONG,
            )

    def _fit(self, sampling: SamplingParams, ids: list[int]) -> SamplingParams:
        """``sampling`` with ``max_new_tokens`` set, after checking that prompt and answer fit."""
        context = self.limits.context_len
        self._refuse_too_long(len(ids))
        wanted = sampling.max_new_tokens
        if wanted is None:
            return replace(sampling, max_new_tokens=context - len(ids))
        if len(ids) + wanted > context:
            raise RequestError(
                f"This model's maximum context length is {context} tokens, and {len(ids)} input tokens and"
                f" {wanted} tokens for the answer are {len(ids) + wanted}: shorten the input, or ask for"
                f" at most {context - len(ids)} new tokens",
                code=_TOO_LONG,
            )
        return sampling

    def _check_rids(self, rids: list[str]) -> None:
        new: set[str] = set()
        for rid in rids:
            if _LONE_SURROGATE.search(rid):
                raise RequestError("the rid is not valid Unicode: it has a lone surrogate")
            if self._peers.prefix + rid in self._samples or rid in new:
                raise RequestError(rid_in_use(rid))
            new.add(rid)

    def _wire_id(self, sample: Sample) -> str:
        """As other processes know it."""
        return self._peers.prefix + sample.rid

    def _refuse_if_closing(self) -> None:
        self._refuse_if_failed()
        if self.closing is not None:
            raise RequestError(self.closing, status_code=503)

    def _refuse_if_failed(self) -> None:
        if self.failure is not None:
            raise RequestError(self.failure, status_code=503)

    # ---- control

    async def flush_cache(self) -> ControlReply:
        return await self._ask(lambda request_id: FlushCacheRequest(request_id))

    async def get_state(self, after_step: int | None = None) -> dict[str, Any]:
        """``after_step``: with the part "live", which has the decode steps after that number."""
        reply = await self._ask(lambda request_id: GetStateRequest(request_id, after_step))
        if not reply.ok:
            raise RequestError(reply.error, status_code=503)
        return reply.body

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    async def pause(self, mode: str) -> None:
        """What comes from now on waits for ``resume``. What runs: ``abort`` ends it, ``retract`` takes its
        KV places, ``in_place`` leaves it as it is.
        """
        self._refuse_if_closing()
        self._hold(True)
        if mode == "abort":
            self.abort_all("aborted by /pause_generation")
        await self._ask(lambda request_id: PauseRequest(request_id, mode == "retract"))

    async def resume(self) -> None:
        await self._ask(lambda request_id: ContinueRequest(request_id))
        self._hold(False)

    def _hold(self, hold: bool) -> None:
        self._hold_own(hold)
        self._peers.tell(HoldRequests(hold))

    def _hold_own(self, hold: bool) -> None:
        if hold:
            self._resumed.clear()
        else:
            self._resumed.set()

    def tell_peers(self, message: ToPeer) -> None:
        self._peers.tell(message)

    async def set_state(self, server_args: dict[str, Any]) -> ControlReply:
        try:
            return await self._ask(lambda request_id: SetStateRequest(request_id, server_args))
        except (OverflowError, RecursionError, TypeError, UnicodeEncodeError) as error:
            raise RequestError(f"a value can't be sent to the scheduler: {error}") from error

    async def _ask(self, message: Callable[[str], ToScheduler | GetStateRequest]) -> ControlReply:
        self._refuse_if_failed()
        request_id = self._peers.prefix + uuid.uuid4().hex
        reply: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._send(message(request_id))
        self._replies[request_id] = reply
        try:
            return await reply
        finally:
            self._replies.pop(request_id, None)  # there still if the wait was given up

    # ---- answers

    def hear(self, message: AbortByRid | HoldRequests) -> None:
        """From another process that answers clients."""
        if isinstance(message, AbortByRid):
            self._abort_own(message.rid, message.reason)
        else:
            self._hold_own(message.hold)

    def receive(self, message: TextBatch | ControlReply) -> None:
        if isinstance(message, ControlReply):
            reply = self._replies.pop(message.request_id, None)
            if reply is not None and not reply.done():
                reply.set_result(message)
            return
        now = self.last_output_ts = time.time()
        for output in message.outputs:
            self._receive_output(output, now)
        self._observer.batch_ended()

    def _receive_output(self, output: TextOutput, now: float) -> None:
        sample = self._samples.get(output.rid)
        if sample is None:
            return  # it has been failed with the server; nobody waits for it
        self._observer.output(sample, output, now)
        if output.new_ids:
            sample.last_output_ts = now
        if output.finish is not None:
            del self._samples[output.rid]
        sample.update(output, now)
        if output.finish is not None:
            self._observer.ended(sample)

    def fail(self, message: str, status_code: int = 500) -> None:
        """Answer everything that waits with an error, and refuse what comes from now on."""
        self.failure = message
        self._resumed.set()
        kind = "InternalServerError" if status_code == 500 else "ServiceUnavailableError"
        finish = FinishReason("abort", message=message, status_code=status_code, err_type=kind)
        samples, self._samples = self._samples, {}
        for sample in samples.values():
            sample.end(finish, time.time())
            self._observer.ended(sample)
        replies, self._replies = self._replies, {}
        for request_id, reply in replies.items():
            if not reply.done():
                reply.set_result(ControlReply(request_id, ok=False, error=message))

    @property
    def num_running(self) -> int:
        return len(self._samples)


def _no_text(token_id: int) -> None:
    return None


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index`` of a request with n > 1: far from those of its neighbours."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
