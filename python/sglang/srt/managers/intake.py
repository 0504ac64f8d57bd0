"""From a message to a Request, or to the reason why it can't be one."""

from __future__ import annotations

from sglang.srt.configs.priority_args import PriorityRules
from sglang.srt.constrained.grammar import spec_of
from sglang.srt.managers.finish import BAD_REQUEST, abort_reason
from sglang.srt.managers.io_struct import FinishReason, GenerateRequest
from sglang.srt.managers.request import Request
from sglang.srt.managers.stop_checker import StopChecker
from sglang.srt.model_executor.step_plan import ExecutorInfo, SlotSampling
from sglang.srt.sampling.sampling_params import LARGEST_NUMBER
from sglang.srt.utils.environment import is_true
from sglang.srt.utils.routed_ids import own_part

NO_PRIORITIES = "this server has no priorities (--enable-priority-scheduling): send the request without one"

NO_PROCESSORS = (
    "this server runs no custom logit processors (--enable-custom-logit-processor): send the request without"
)


class Intake:
    def __init__(
        self,
        info: ExecutorInfo,
        stops: StopChecker,
        priorities: PriorityRules | None = None,
        refuse_priorities: bool = False,
        runs_processors: bool = False,
        has_workers: bool = False,
    ) -> None:
        """``priorities`` None: they have no effect, or are refused; ``has_workers``: ids say who asks."""
        self._info = info
        self._priorities = priorities
        self._refuse_priorities = refuse_priorities
        self._runs_processors = runs_processors
        self._has_workers = has_workers
        self._stops = stops
        self._scales_logprobs = not is_true("SGLANG_RETURN_ORIGINAL_LOGPROB")
        self._num_arrived = 0

    def make(self, message: GenerateRequest) -> Request:
        room = max(1, self._info.context_len - len(message.input_ids))
        wanted = message.sampling.max_new_tokens
        max_new_tokens = room if wanted is None else min(wanted, room)
        stop_ids = self._stops.stop_ids(message.sampling)
        sampling = self._slot_sampling(message, stop_ids)
        self._num_arrived += 1
        name = own_part(message.rid) if self._has_workers else message.rid
        return Request(
            message, self._num_arrived, max_new_tokens, sampling, frozenset(stop_ids), name,
            self._draft_class(sampling), self._scales_logprobs,
            0 if self._priorities is None else self._priorities.rank(message.priority),
        )  # fmt: skip

    def objection(self, message: GenerateRequest) -> FinishReason | None:
        """Figures, so that the user knows what would be accepted."""
        ids, info = message.input_ids, self._info
        capacity = info.num_pages * info.page_size
        if not ids:
            return abort_reason("the prompt has no tokens", BAD_REQUEST)
        if len(ids) >= info.context_len:
            return abort_reason(
                f"the prompt of {len(ids)} tokens is too long: the context has room for {info.context_len} "
                "tokens, of which at least one is for the answer",
                BAD_REQUEST,
            )
        if len(ids) + 1 > capacity:
            return abort_reason(
                f"the prompt of {len(ids)} tokens is too long: the KV cache has room for {capacity} tokens, "
                "of which at least one is for the answer",
                BAD_REQUEST,
            )
        if min(ids) < 0 or max(ids) >= info.vocab_size:
            return abort_reason(
                f"the prompt has token ids outside 0 … {info.vocab_size - 1} (from {min(ids)} to {max(ids)})",
                BAD_REQUEST,
            )
        if message.processor is not None:
            wrong = self._objection_to_processor(message.processor)
            if wrong is not None:
                return abort_reason(wrong, BAD_REQUEST)
        if self._refuse_priorities and message.priority is not None:
            return abort_reason(NO_PRIORITIES, BAD_REQUEST)
        biased = [token for token, _ in message.sampling.logit_bias]
        if biased and not 0 <= min(biased) <= max(biased) < info.vocab_size:
            return abort_reason(
                f"logit_bias names token ids outside 0 … {info.vocab_size - 1} (from {min(biased)} to "
                f"{max(biased)})",
                BAD_REQUEST,
            )
        return None

    def _objection_to_processor(self, text: str) -> str | None:
        if not self._runs_processors:
            return NO_PROCESSORS
        # It may bring all of torch along, which this process need not have.
        from sglang.srt.sampling.custom_logit_processor import ProcessorError, load_processor

        try:
            load_processor(text)
        except ProcessorError as error:
            return str(error)
        return None

    def _draft_class(self, sampling: SlotSampling) -> str:
        cap, num_steps = sampling.draft_cap, self._info.spec.num_steps if self._info.spec else 0
        kind = "sampled" if sampling.temperature else "greedy"
        if cap is None or cap >= num_steps:
            return kind
        return f"{kind}, at most {cap}" if cap else ""

    def _slot_sampling(self, message: GenerateRequest, stop_ids: tuple[int, ...]) -> SlotSampling:
        params = message.sampling
        suppressed: tuple[int, ...] = ()
        is_masked = spec_of(params) is not None or (message.rules is not None and message.rules.need_masks)
        # Masks leave them out, unless nothing else may follow.
        if params.min_new_tokens > 0 and not is_masked:
            # A stop id beyond the vocabulary is harmless (upstream's users send them) but has no logit.
            suppressed = tuple(t for t in stop_ids if 0 <= t < self._info.vocab_size)
        return SlotSampling(
            temperature=0.0 if params.greedy else params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            frequency_penalty=params.frequency_penalty,
            presence_penalty=params.presence_penalty,
            repetition_penalty=params.repetition_penalty,
            min_new_tokens=params.min_new_tokens,
            suppressed_ids=suppressed,
            logit_bias=_biases(message),
            seed=params.sampling_seed or 0,
            draft_cap=params.speculative_draft_len,
        )


def _biases(message: GenerateRequest) -> tuple[tuple[int, float], ...]:
    """A bad word of one token needs no mask: nothing depends on what was before."""
    words = () if message.rules is None else message.rules.bad_words
    banned = {word[0]: -LARGEST_NUMBER for word in words if len(word) == 1}
    return tuple(sorted({**dict(message.sampling.logit_bias), **banned}.items()))
