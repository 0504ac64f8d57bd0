"""The body of POST /generate (and the arguments of ``Engine.generate``) as requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sglang.srt.entrypoints.native_wishes import wishes
from sglang.srt.entrypoints.reasoning_ends import reasoning_mark, with_thinking
from sglang.srt.entrypoints.scheduling_fields import scheduled
from sglang.srt.entrypoints.text_only import TEXT_ONLY
from sglang.srt.managers.text_request import RequestError, TextRequest
from sglang.srt.sampling.sampling_params import ReasoningEnd, SamplingParams, SamplingParamsError
from sglang.srt.utils.text_tokenizer import TextTokenizer

_MEDIA: Final = ("image_data", "video_data", "audio_data")
# Known features that are not supported. A value that switches one off is accepted.
UNSUPPORTED: Final = (
    "input_embeds", *_MEDIA, "lora_path", "session_params", "session_id", "routed_dp_rank", "bootstrap_host",
    "bootstrap_port", "bootstrap_room", "return_routed_experts", "return_sampling_mask",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class NativeCall:
    requests: list[TextRequest]
    is_list: bool  # several prompts were given, even if it is a list of one
    stream: bool
    return_prompt_token_ids: bool

    @property
    def answers_with_list(self) -> bool:
        return self.is_list or self.requests[0].sampling.n > 1


def refuse_unsupported(body: Mapping[str, Any], names: Sequence[str]) -> None:
    """
    Raises:
        RequestError: a field asks for a feature that is not supported; it is named.
    """
    for name in names:
        value = body.get(name)
        if value is None or value is False or value == 0 or value == [] or value == {} or value == "":
            continue
        reason = f": {TEXT_ONLY}" if name in _MEDIA else " by this server: leave it out"
        raise RequestError(f"{name} is not supported{reason}")


def parse_call(body: Any, reasoning_parser: str | None, tokenizer: TextTokenizer) -> NativeCall:
    """
    Raises:
        RequestError: a field is missing, of the wrong type, or not supported.
    """
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    refuse_unsupported(body, UNSUPPORTED)
    prompts, is_list = _prompts(body.get("text"), body.get("input_ids"))
    samplings = _samplings(body.get("sampling_params"), len(prompts))
    rids = _rids(body.get("rid"), len(prompts), is_list)
    stream = _boolean(body, "stream", False)
    log_metrics = _boolean(body, "log_metrics", True)
    mark = reasoning_mark(reasoning_parser)
    end = ReasoningEnd(mark) if _boolean(body, "require_reasoning", False) else None
    texts = _boolean(body, "return_text_in_logprobs", False)
    requests = [
        TextRequest(
            prompt, sampling, rid, stream, log_metrics=log_metrics, reasoning_end=end, wish=wish,
            logprob_texts=texts,
        )
        for prompt, sampling, rid, wish in zip(
            prompts, samplings, rids, wishes(body, len(prompts)), strict=True
        )
    ]  # fmt: skip
    requests = scheduled(requests, body)
    requests = [with_thinking(request, reasoning_parser, tokenizer) for request in requests]
    return NativeCall(requests, is_list, stream, _boolean(body, "return_prompt_token_ids", False))


def _prompts(text: Any, input_ids: Any) -> tuple[list[str | list[int]], bool]:
    if (text is None) == (input_ids is None):
        raise RequestError("give either text or input_ids")
    if isinstance(text, str):
        return [text], False
    if isinstance(text, list) and text and all(isinstance(item, str) for item in text):
        return list(text), True
    if _is_ids(input_ids):
        return [input_ids], False
    if isinstance(input_ids, list) and input_ids and all(_is_ids(item) for item in input_ids):
        return list(input_ids), True
    if text is not None:
        raise RequestError("text must be a string or a non-empty list of strings")
    raise RequestError("input_ids must be a non-empty list of token ids, or a list of such lists")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _samplings(given: Any, count: int) -> list[SamplingParams]:
    if isinstance(given, list):
        if len(given) != count:
            raise RequestError(f"sampling_params has {len(given)} entries for {count} prompts")
        return [_sampling(item) for item in given]
    return [_sampling(given)] * count


def _sampling(given: Any) -> SamplingParams:
    if given is not None and not isinstance(given, dict):
        raise RequestError(f"sampling_params must be an object, got {given!r}")
    return checked_sampling(given or {})


def checked_sampling(given: dict[str, Any], defaults: dict[str, Any] | None = None) -> SamplingParams:
    """
    Raises:
        RequestError: a value is out of range or not supported.
    """
    try:
        return SamplingParams.from_dict(given, defaults)
    except SamplingParamsError as error:
        raise RequestError(str(error)) from error


def _rids(given: Any, count: int, is_list: bool) -> list[str | None]:
    if given is None:
        return [None] * count
    if isinstance(given, str) and not is_list:
        return [given]
    if isinstance(given, list) and len(given) == count and all(isinstance(item, str) for item in given):
        return list(given)
    raise RequestError("rid must be a string, or a list of strings with one for each prompt")


def _boolean(body: Mapping[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RequestError(f"{name} must be true or false, got {value!r}")
    return value
