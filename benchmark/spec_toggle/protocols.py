"""How a request is put to a server, and how its stream is read: SGLang's own way, and OpenAI's. Pure."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final

from benchmark.spec_toggle.client import GenerationError, StreamTrace, parse_trace, require_finished
from benchmark.spec_toggle.prompts import Prompt

_NEWS: Final = ("content", "reasoning_content", "reasoning", "tool_calls")
"""Fields of a chat delta that bring tokens."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked of every request of a run."""

    tokens: int
    temperature: float = 0.0
    ignore_eos: bool = True  # exactly so many tokens, also past the end of the answer
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a request must ask for at least 1 token, not {self.tokens}")


@dataclass(frozen=True, slots=True)
class Protocol:
    """One way to talk to a server."""

    name: str
    path: str
    body: Callable[[Prompt, Wish, str], dict[str, Any]]  # (prompt, wish, model's name)
    parse: Callable[[float, Sequence[tuple[float, bytes]]], StreamTrace]  # (start, events)
    needs_text: bool  # prompts must be complete texts (chat template applied)


def _native_body(prompt: Prompt, wish: Wish, model: str) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": wish.temperature, "max_new_tokens": wish.tokens}
    if wish.ignore_eos:
        params["ignore_eos"] = True
    if wish.seed is not None:
        params["sampling_seed"] = wish.seed
    return {"text": prompt.text, "sampling_params": params}


def _openai_body(prompt: Prompt, wish: Wish, model: str) -> dict[str, Any]:
    """Only what OpenAI's own endpoint takes."""
    body: dict[str, Any] = {
        "model": model,
        "messages": prompt.chat_messages(),
        "max_completion_tokens": wish.tokens,
        "temperature": wish.temperature,
        "stream_options": {"include_usage": True},
    }
    return body if wish.seed is None else {**body, "seed": wish.seed}


def _chat_body(prompt: Prompt, wish: Wish, model: str) -> dict[str, Any]:
    """With what SGLang and vLLM add: exact lengths, and the count of tokens in every chunk."""
    body = _openai_body(prompt, wish, model)
    body["max_tokens"] = body.pop("max_completion_tokens")
    return body | _extensions(wish)


def _completions_body(prompt: Prompt, wish: Wish, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt.text,
        "max_tokens": wish.tokens,
        "temperature": wish.temperature,
    }
    if wish.seed is not None:
        body["seed"] = wish.seed
    return body | _extensions(wish)


def _extensions(wish: Wish) -> dict[str, Any]:
    options = {"include_usage": True, "continuous_usage_stats": True}
    return {"stream_options": options, "ignore_eos": wish.ignore_eos}


def parse_openai(started: float, received: Sequence[tuple[float, bytes]]) -> StreamTrace:
    """Turn the chunks of a chat or text completion into its trace.

    Where chunks don't carry their count of tokens, the total is spread evenly over them.

    Raises:
        GenerationError: a chunk carries an error, or the stream ended before the request did.
    """
    times: list[float] = []
    counts: list[int] = []  # of each chunk with news; 0: not told
    texts: list[str] = []
    total, most, finish = 0, 0, None
    for arrived, data in received:
        chunk = json.loads(data)
        if chunk.get("error"):
            raise GenerationError(f"the stream ended with an error: {chunk['error']}")
        told = int((chunk.get("usage") or {}).get("completion_tokens") or 0)
        total = max(total, told)
        for choice in chunk.get("choices") or ():
            finish = choice.get("finish_reason") or finish
            news = _news(choice)
            # The closing chunk may bring tokens without text: ends, or bytes of half a character.
            if news or told > most:
                texts.append(news)
                times.append(arrived)
                counts.append(told)
                most = max(most, told)
    require_finished({"type": finish} if finish else None)
    moments, cumulative = _counted(times, counts, total)
    meta = {"completion_tokens": cumulative[-1] if cumulative else 0, "finish_reason": {"type": finish}}
    return StreamTrace(started, moments, cumulative, (), meta, "".join(texts))


def _news(choice: Mapping[str, Any]) -> str:
    """Return the text that a choice's chunk brings, whatever field it is in."""
    if "text" in choice:
        return str(choice["text"] or "")
    delta = choice.get("delta") or {}
    return "".join(
        value if isinstance(value, str) else json.dumps(value) for name in _NEWS if (value := delta.get(name))
    )


def _counted(
    times: Sequence[float], told: Sequence[int], total: int
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the moments at which the number of tokens grew, and the numbers."""
    counts: Sequence[int] = told
    if not all(told):  # not told with every chunk
        total = max(total, len(told))
        counts = [round(total * (index + 1) / len(told)) for index in range(len(told))]
    before = [0, *accumulate(counts, max)]
    grown = [index for index, count in enumerate(counts) if count > before[index]]
    return tuple(times[i] for i in grown), tuple(counts[i] for i in grown)


NATIVE: Final = Protocol("native", "/generate", _native_body, parse_trace, needs_text=True)
CHAT: Final = Protocol("chat", "/v1/chat/completions", _chat_body, parse_openai, needs_text=False)
COMPLETIONS: Final = Protocol("completions", "/v1/completions", _completions_body, parse_openai, True)
OPENAI: Final = Protocol("openai", "/v1/chat/completions", _openai_body, parse_openai, needs_text=False)
PROTOCOLS: Final = MappingProxyType({p.name: p for p in (NATIVE, CHAT, COMPLETIONS, OPENAI)})
