"""Messages between the processes. msgspec structs, tagged by class name; no pickle.
Those made for every row of every step are no business of the garbage collector (``gc=False``): they are
parts of no cycle. They go without their fields' names (``array_like``), which were four fifths of a message.

    TokenizerManager ──► Scheduler ──► Detokenizer ──► TokenizerManager
           ▲───────── ControlReply ───────┘

GetStateRequest goes to the scheduler's process too, on a way of its own: nothing it is busy with delays it.

``rid`` names one sample of one request (a request with n > 1 or a list becomes several).
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.model_executor.step_plan import Logprobs, Vectors
from sglang.srt.sampling.sampling_params import ChoiceRules, ReasoningEnd, SamplingParams


class Message(msgspec.Struct, frozen=True, tag=True, array_like=False):
    """Base of everything that crosses a process boundary."""


# ---- tokenizer manager -> scheduler -------------------------------------------------------------


def rid_in_use(rid: str) -> str:
    """What a client is told by whoever sees it first."""
    return f"rid {rid!r} is in use by a request that is still running"


class RequestWish(msgspec.Struct, frozen=True):
    """What a request is to tell beside its ids."""

    logprobs: bool = False  # of its own ids …
    logprob_start: int = -1  # … and of the prompt's behind this one; -1: none of these
    num_top: int = 0  # also of so many ids that are the likeliest at each place
    token_ids: tuple[int, ...] | None = None  # and of these
    hidden_states: str = ""  # "all", or the "last" one


class GenerateRequest(Message, frozen=True):
    rid: str
    input_ids: list[int]
    sampling: SamplingParams  # n == 1, sampling_seed set, max_new_tokens resolved or None
    stream: bool
    received_ts: float  # time.time() when the request was read
    reasoning_end: ReasoningEnd | None = None  # where a grammar begins; None: at once
    rules: ChoiceRules | None = None
    processor: str | None = None  # custom logit processor
    cache_salt: str = ""  # requests with different ones share no prefix
    priority: int | None = None  # as the client says it
    wish: RequestWish | None = None


class AbortRequest(Message, frozen=True):
    rid: str  # ignored with abort_all
    abort_all: bool = False
    reason: str = "aborted by the client"


class FlushCacheRequest(Message, frozen=True):
    request_id: str


class PauseRequest(Message, frozen=True):
    """No step from now on, until ContinueRequest. ``retract``: what runs gives its KV places back first."""

    request_id: str
    retract: bool = False


class ContinueRequest(Message, frozen=True):
    request_id: str


class GetStateRequest(Message, frozen=True):
    request_id: str
    after_step: int | None = None  # the answer has a part "live" too: decode steps after that number


class SetStateRequest(Message, frozen=True):
    """``server_args`` of POST /set_internal_state."""

    request_id: str
    server_args: dict[str, Any]


# ---- scheduler -> detokenizer -> tokenizer manager ------------------------------------------------


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """As in ``meta_info.finish_reason``: stop (matched), length (length), abort (message, …)."""

    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None
    status_code: int | None = None
    err_type: str | None = None


class RequestStats(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """Figures of one request so far; goes into ``meta_info``."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    num_retractions: int = 0
    decode_steps_plain: int = 0
    decode_steps_spec: int = 0
    spec_tokens: int = 0  # emitted by speculative steps, bonus tokens included
    spec_verify_ct: int = 0
    spec_num_correct_drafts: int = 0
    spec_num_proposed_drafts: int = 0
    spec_correct_drafts_histogram: list[int] = []
    admitted_ts: float | None = None  # time.time(), as the next
    first_token_ts: float | None = None


class TokenReport(msgspec.Struct, frozen=True, gc=False):
    """What a request wished to know, as far as it is new."""

    prompt: Logprobs
    chosen: Logprobs  # of the new ids
    hidden: tuple[Vectors, ...] = ()  # the last one alone takes the place of an earlier one
    unkept_id: int | None = None  # the one that ``chosen`` is about, of an answer that is to have none


class TokenOutput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """New ids of one request since its last output (all of them at once if it does not stream)."""

    rid: str
    new_ids: list[int]
    stats: RequestStats
    finish: FinishReason | None = None
    stop_trim: str | None = None  # matched stop string, to be cut from the text (with what follows)
    skip_special_tokens: bool = True
    # Stop strings the request was given; empty with no_stop_trim. The detokenizer holds back a tail
    # of the text that may turn out to begin one of them.
    stop: tuple[str, ...] = ()
    no_stop_trim: bool = False  # the id that ended it is part of the text
    report: TokenReport | None = None


class TokenBatch(Message, frozen=True):
    outputs: list[TokenOutput]


class TextOutput(msgspec.Struct, frozen=True, gc=False, array_like=True):
    rid: str
    new_text: str  # text that became certain with these ids; may be empty
    new_ids: list[int]
    stats: RequestStats
    finish: FinishReason | None = None
    report: TokenReport | None = None


class TextBatch(Message, frozen=True):
    outputs: list[TextOutput]


class ControlReply(Message, frozen=True):
    """Answer to a control message: ``body`` with ok, else ``error`` (a sentence for the user)."""

    request_id: str
    ok: bool
    body: dict[str, Any] = {}
    error: str = ""


class Ready(Message, frozen=True):
    """A child process has finished starting (sent once, to the parent)."""

    name: str
    info: dict[str, Any] = {}


class Failed(Message, frozen=True):
    """A child process could not start or is about to die; ``error`` is one line for the user."""

    name: str
    error: str


# ---- between the processes that answer clients, where there are several ------------------------------


class AbortByRid(Message, frozen=True):
    """To the other workers: they may have samples that it names."""

    rid: str
    reason: str


class HoldRequests(Message, frozen=True):
    """To the other workers: what comes from now on waits, or doesn't any more."""

    hold: bool


class LogRequests(Message, frozen=True):
    """To the other workers: what is logged of requests from now on."""

    enabled: bool
    level: int


class StopWorker(Message, frozen=True):
    """From the launcher: take no more requests. ``at_once``: end those that run, too."""

    at_once: bool


ToScheduler = (
    GenerateRequest | AbortRequest | FlushCacheRequest | SetStateRequest | PauseRequest | ContinueRequest
)
ToDetokenizer = TokenBatch
ToPeer = AbortByRid | HoldRequests | LogRequests
ToTokenizer = TextBatch | ControlReply | Ready | Failed | ToPeer | StopWorker

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
scheduler_decoder: msgspec.msgpack.Decoder[ToScheduler] = msgspec.msgpack.Decoder(ToScheduler)
state_decoder: msgspec.msgpack.Decoder[GetStateRequest] = msgspec.msgpack.Decoder(GetStateRequest)
detokenizer_decoder: msgspec.msgpack.Decoder[ToDetokenizer] = msgspec.msgpack.Decoder(ToDetokenizer)
tokenizer_decoder: msgspec.msgpack.Decoder[ToTokenizer] = msgspec.msgpack.Decoder(ToTokenizer)
