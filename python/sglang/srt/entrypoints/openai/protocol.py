"""Bodies of OpenAI's completions and chat completions, with SGLang's additions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, Field

from sglang.srt.entrypoints.bodies import Body
from sglang.srt.entrypoints.native_request import checked_sampling, refuse_unsupported
from sglang.srt.entrypoints.native_wishes import MAX_TOP_LOGPROBS
from sglang.srt.entrypoints.openai.response_format import grammar_params
from sglang.srt.entrypoints.scheduling_fields import cache_salt, checked_priority, checked_processor
from sglang.srt.managers.io_struct import RequestWish
from sglang.srt.managers.text_request import RequestError
from sglang.srt.sampling.sampling_params import SamplingParams

_UNSUPPORTED: Final = (
    "top_logprobs", "tools", "functions", "function_call",
    "lora_path", "session_params", "suffix", "audio", "prediction",
)  # fmt: skip

# SamplingParams' names -> those of this interface, where an error's sentence speaks of them.
_OWN_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
_FOREIGN_NAME: Final = re.compile(rf"\b({'|'.join(_OWN_NAMES)})(?= must| \()")

# One wrong item is enough: collecting a million of them would keep everybody else waiting.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Prompts = Annotated[list[Ids], Field(fail_fast=True)]
Messages = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class StreamOptions(BaseModel):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What both have in common. Fields nobody knows are ignored, as OpenAI's clients expect."""

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    stop_regex: str | Texts | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, Any] | None = None
    seed: int | None = None
    bad_words: str | Texts | None = None
    thinking_budget: int | None = None
    thinking_token_budget: int | None = None
    custom_params: dict[str, Any] | None = None
    priority: int | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    custom_logit_processor: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_hidden_states: bool | Literal["last"] = False
    rid: str | None = None
    return_cached_tokens_details: bool = False
    return_spec_tokens_details: bool = False
    return_token_ids: bool = False
    speculative_draft_len: int | None = None
    response_format: Any = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    def refuse_unsupported(self) -> None:
        extra = self.model_extra or {}
        refuse_unsupported(extra, _UNSUPPORTED)
        if extra.get("best_of") not in (None, 1):
            raise RequestError("best_of is not supported by this server: leave it out, and choose of n")
        if extra.get("tool_choice") not in (None, "none", "auto"):
            raise RequestError("tool_choice is not supported by this server: leave it out")

    def _json_params(self) -> dict[str, Any]:
        form = grammar_params(self.response_format)
        if self.json_schema is not None and form:
            raise RequestError("response_format and json_schema are given: only one of them can be")
        return form or {"json_schema": self.json_schema}

    def scheduling(self) -> dict[str, Any]:
        """As fields of a ``TextRequest``."""
        salt = cache_salt(self.cache_salt, self.extra_key)
        processor = checked_processor(self.custom_logit_processor)
        return {"cache_salt": salt, "priority": checked_priority(self.priority), "processor": processor}

    def _wish(self, logprobs: bool, num_top: int = 0, start: int = -1) -> RequestWish | None:
        hidden = "last" if self.return_hidden_states else ""  # here true shows the last one too
        return RequestWish(logprobs, start, num_top, None, hidden) if logprobs or hidden else None

    def sampling(self, defaults: dict[str, Any], max_new_tokens: int | None) -> SamplingParams:
        """``max_new_tokens`` None: as many as the context holds."""
        stop = self.stop if self.stop not in ("", []) else None
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "max_new_tokens": max_new_tokens,
            "min_new_tokens": self.min_tokens,
            "n": self.n,
            "stop": stop,
            "stop_token_ids": self.stop_token_ids,
            "stop_regex": self.stop_regex if self.stop_regex not in ("", []) else None,
            "no_stop_trim": self.no_stop_trim,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "logit_bias": self.logit_bias,
            "bad_words": self.bad_words if self.bad_words not in ("", []) else None,
            "thinking_budget": self.thinking_budget,
            "thinking_token_budget": self.thinking_token_budget,
            "custom_params": self.custom_params,
            "sampling_seed": self.seed,
            "speculative_draft_len": self.speculative_draft_len,
            "regex": self.regex,
            "ebnf": self.ebnf,
            **self._json_params(),
        }
        try:
            return checked_sampling(given, {**defaults, "max_new_tokens": None})
        except RequestError as error:
            message = _FOREIGN_NAME.sub(lambda match: _OWN_NAMES[match[1]], str(error))
            raise RequestError(message) from error


class ChatBody(GenerationBody):
    messages: Messages
    max_completion_tokens: int | None = None
    input_ids: Ids | None = None
    continue_final_message: bool = False
    tools: Messages | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_prompt_token_ids: bool = False
    return_meta_info: bool = False
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def wish(self) -> RequestWish | None:
        """
        Raises:
            RequestError: what is wished can't be told.
        """
        num_top = _num_top("top_logprobs", self.top_logprobs or 0)
        if num_top and not self.logprobs:
            raise RequestError("top_logprobs is for requests with logprobs: true")
        return self._wish(bool(self.logprobs), num_top)


class CompletionBody(GenerationBody):
    prompt: str | Ids | Texts | Prompts
    echo: bool = False
    logprobs: bool | int | None = None

    def wish(self) -> RequestWish | None:
        """
        Raises:
            RequestError: what is wished can't be told.
        """
        if self.logprobs is None or self.logprobs is False:
            return self._wish(False)
        if self.logprobs is True:
            raise RequestError("logprobs must be a number: of the likeliest tokens to show at each place")
        num_top = _num_top("logprobs", self.logprobs)
        return self._wish(True, num_top, start=0 if self.echo else -1)


def _num_top(name: str, value: int) -> int:
    if not 0 <= value <= MAX_TOP_LOGPROBS:
        raise RequestError(f"{name} must be from 0 to {MAX_TOP_LOGPROBS}, got {value}")
    return value
