"""The servers that can be measured: where a request goes, what it says, how its answer is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from sglang.benchmark.prompt_row import DatasetError, PromptRow
from sglang.benchmark.stream_readers import NativeReader, OpenAIReader, Reader

Body = dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestSettings:
    """What all requests of a run have in common."""

    model: str
    temperature: float | None = 0.0  # None: the server's default
    top_p: float | None = 1.0
    stream: bool = True
    ignore_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Backend:
    name: str
    path: str
    port: int | None  # where such a server listens unless told otherwise
    body: Callable[[PromptRow, RequestSettings], Body]
    reader: Callable[[float], Reader]

    @property
    def is_sglang(self) -> bool:
        return self.name.startswith("sglang")

    def request(self, row: PromptRow, settings: RequestSettings) -> Body:
        """The JSON body of one request; what the user adds wins, also inside of ``sampling_params``."""
        body = self.body(row, settings)
        for extra in (row.extra, settings.extra):
            for name, value in extra.items():
                both = isinstance(value, dict) and isinstance(body.get(name), dict)
                body[name] = {**body[name], **value} if both else value
        return body


def _given(**values: Any) -> Body:
    return {name: value for name, value in values.items() if value is not None}


def _text_or_ids(row: PromptRow) -> str | list[int]:
    """
    Raises:
        DatasetError: the row is a conversation that no chat template was applied to.
    """
    prompt = row.prompt
    if isinstance(prompt, str):
        return prompt
    ids = [item for item in prompt if isinstance(item, int)]
    if len(ids) != len(prompt):
        raise DatasetError(
            "the data set has conversations: give the model's folder with --tokenizer, so that its chat"
            " template can be applied, or use a chat backend"
        )
    return ids


def _native(row: PromptRow, settings: RequestSettings) -> Body:
    prompt = _text_or_ids(row)
    sampling = _given(temperature=settings.temperature, top_p=settings.top_p, max_new_tokens=row.output_len)
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        "sampling_params": {**sampling, "ignore_eos": settings.ignore_eos},
        "stream": settings.stream,
    }


def _common(settings: RequestSettings, usage: Body) -> Body:
    body = _given(model=settings.model, temperature=settings.temperature, top_p=settings.top_p)
    body["stream"] = settings.stream
    if settings.stream:
        body["stream_options"] = usage
    return body


def _completions(row: PromptRow, settings: RequestSettings) -> Body:
    body = {**_common(settings, {"include_usage": True}), "prompt": _text_or_ids(row)}
    return {**body, "max_tokens": row.output_len}


def _chat(row: PromptRow, settings: RequestSettings) -> Body:
    body = {**_common(settings, {"include_usage": True}), "messages": row.chat_messages()}
    body["max_completion_tokens"] = row.output_len
    if row.tools is not None:
        body["tools"] = row.tools
    return body


def _extended(body: Callable[[PromptRow, RequestSettings], Body]) -> Callable[..., Body]:
    """With what SGLang and vLLM add: answers of a fixed length, and a count of tokens in every chunk."""

    def build(row: PromptRow, settings: RequestSettings) -> Body:
        made = body(row, settings)
        made["ignore_eos"] = settings.ignore_eos
        if settings.stream:
            made["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        return made

    return build


_COMPLETIONS: Final = "/v1/completions"
_CHAT: Final = "/v1/chat/completions"
_ALL: Final = (
    Backend("sglang", "/generate", 30000, _native, NativeReader),
    Backend("sglang-native", "/generate", 30000, _native, NativeReader),
    Backend("sglang-oai", _COMPLETIONS, 30000, _extended(_completions), OpenAIReader),
    Backend("sglang-oai-chat", _CHAT, 30000, _extended(_chat), OpenAIReader),
    Backend("vllm", _COMPLETIONS, 8000, _extended(_completions), OpenAIReader),
    Backend("vllm-chat", _CHAT, 8000, _extended(_chat), OpenAIReader),
    Backend("openai", _COMPLETIONS, None, _completions, OpenAIReader),
    Backend("openai-chat", _CHAT, None, _chat, OpenAIReader),
)
BACKENDS: Final[Mapping[str, Backend]] = MappingProxyType({backend.name: backend for backend in _ALL})
