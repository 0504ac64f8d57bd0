"""Sampling parameters as a user gives them (SGLang's names, defaults and ranges)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from typing import Any

from sglang.srt.utils.stop_regex import StopPattern, StopRegexError

GREEDY_BELOW = 1e-6
MAX_STOPS = 32
MAX_STOP_IDS = 256  # a slot's lists of ids have a fixed size on a GPU, and what one device takes all do
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_GRAMMAR_LEN = 1 << 20
LARGEST_INT = 2**31 - 1  # of counts, limits and ids: sums of them still fit in a device's int64
LARGEST_NUMBER = 1e30  # of what is multiplied, divided and added as float32


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """Where the part of a reply ends that its grammar has no say in: behind ``text``."""

    text: str
    begin_id: int | None = None  # there is such a part only if the reply begins with this token; None: always


@dataclass(frozen=True, slots=True)
class ThinkingLimit:
    """So many tokens, and then the end, as these ids unless the reply has it already."""

    budget: int
    end: ReasoningEnd
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChoiceRules:
    """What depends on the tokenizer: which tokens may not follow which."""

    bad_words: tuple[tuple[int, ...], ...] = ()
    thinking: ThinkingLimit | None = None

    @property
    def need_masks(self) -> bool:
        """Whether what may follow depends on what came before."""
        return self.thinking is not None or any(len(word) > 1 for word in self.bad_words)


class SamplingParamsError(ValueError):
    """A request's sampling parameters are not acceptable; the message says what to write."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    max_new_tokens: int | None = 128  # None: up to the context length
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    stop_regex: tuple[str, ...] = ()
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # of decoders that put blanks there: none here does
    no_stop_trim: bool = False
    stream_interval: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    sampling_seed: int | None = None
    bad_words: tuple[str, ...] = ()
    thinking_budget: int | None = None  # most tokens of the reasoning; None: as many as it takes
    custom_params: str | None = None  # of the custom logit processor, as JSON
    speculative_draft_len: int | None = None  # most drafts accepted a step; 0: plain choice only
    # What the output must be; at most one of them. Given as text, or (json_schema, structural_tag) as JSON.
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @staticmethod
    def from_dict(given: dict[str, Any], defaults: dict[str, Any] | None = None) -> SamplingParams:
        """Parse and check a request's ``sampling_params``; None values mean "not given"."""
        merged = {**(defaults or {}), **{k: v for k, v in given.items() if v is not None}}
        _one_budget(merged)
        known = {f.name for f in fields(SamplingParams)}
        unknown = sorted(set(merged) - known)
        if unknown:
            raise SamplingParamsError(
                f"unknown or unsupported sampling parameter(s) {', '.join(unknown)};"
                f" supported: {', '.join(sorted(known))}"
            )
        if "stop" in merged:
            merged["stop"] = _strings("stop", merged["stop"])
        if "stop_regex" in merged:
            merged["stop_regex"] = _strings("stop_regex", merged["stop_regex"])
        if "bad_words" in merged:
            merged["bad_words"] = _strings("bad_words", merged["bad_words"])
        if "stop_token_ids" in merged:
            merged["stop_token_ids"] = _ids("stop_token_ids", merged["stop_token_ids"])
        if "logit_bias" in merged:
            merged["logit_bias"] = _biases(merged["logit_bias"])
        for name in _GRAMMAR_FIELDS & merged.keys():
            merged[name] = _grammar(name, merged[name])
        params = SamplingParams(**{name: _typed(name, value) for name, value in merged.items()})
        params._check()
        return params

    def for_sample(self, seed: int) -> SamplingParams:
        """The parameters of one sample of ``n``, with the seed given."""
        return replace(self, n=1, sampling_seed=seed)

    def _check_patterns(self) -> None:
        for text in self.stop_regex:
            try:
                StopPattern.of(text)
            except StopRegexError as error:
                raise SamplingParamsError(f"stop_regex {error}") from error

    def _check(self) -> None:
        def need(ok: bool, message: str) -> None:
            if not ok:
                raise SamplingParamsError(message)

        need(self.temperature >= 0, f"temperature must be >= 0, got {self.temperature}")
        need(0 < self.top_p <= 1, f"top_p must be in (0, 1], got {self.top_p}")
        need(self.top_k == -1 or self.top_k >= 1, f"top_k must be -1 (all) or >= 1, got {self.top_k}")
        need(0 <= self.min_p <= 1, f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("frequency_penalty", "presence_penalty"):
            value = getattr(self, name)
            need(-2 <= value <= 2, f"{name} must be in [-2, 2], got {value}")
        need(
            0 < self.repetition_penalty <= 2,
            f"repetition_penalty must be in (0, 2], got {self.repetition_penalty}",
        )
        limit = self.max_new_tokens
        need(limit is None or limit >= 0, f"max_new_tokens must be >= 0, got {limit}")
        need(self.min_new_tokens >= 0, f"min_new_tokens must be >= 0, got {self.min_new_tokens}")
        need(
            limit is None or self.min_new_tokens <= limit,
            f"min_new_tokens ({self.min_new_tokens}) must not exceed max_new_tokens ({limit})",
        )
        need(len(self.stop) <= MAX_STOPS, f"at most {MAX_STOPS} stop strings, got {len(self.stop)}")
        need(len(self.stop_regex) <= MAX_STOPS, f"at most {MAX_STOPS} stop_regex, got {len(self.stop_regex)}")
        self._check_patterns()
        given = len(self.bad_words)
        need(given <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} bad_words, got {given}")
        budget = self.thinking_budget
        need(budget is None or budget >= 0, f"thinking_budget must be >= 0 (or -1: no limit), got {budget}")
        need(1 <= self.n <= 128, f"n must be in [1, 128], got {self.n}")
        cap = self.speculative_draft_len
        need(cap is None or cap >= 0, f"speculative_draft_len must be >= 0, got {cap}")
        interval = self.stream_interval
        need(interval is None or interval >= 1, f"stream_interval must be >= 1, got {interval}")
        need(
            all(0 <= t <= LARGEST_INT for t in self.stop_token_ids),
            f"stop_token_ids must be from 0 to {LARGEST_INT}",
        )
        for name, most in (("stop_token_ids", MAX_STOP_IDS), ("logit_bias", MAX_LOGIT_BIASES)):
            given = len(getattr(self, name))
            need(given <= most, f"{name} may have at most {most} entries, got {given}")
        for name in sorted(_INT_FIELDS - {"sampling_seed"}):
            value = getattr(self, name)
            need(value is None or value <= LARGEST_INT, f"{name} must be at most {LARGEST_INT}, got {value}")
        given_grammars = [name for name in sorted(_GRAMMAR_FIELDS) if getattr(self, name) is not None]
        need(len(given_grammars) <= 1, f"{' and '.join(given_grammars)} are given: only one of them can be")
        seed = self.sampling_seed
        need(seed is None or -(2**63) <= seed < 2**63, f"sampling_seed must fit in 64 bits, got {seed}")


_INT_FIELDS = {
    "max_new_tokens", "top_k", "min_new_tokens", "n", "stream_interval", "sampling_seed",
    "speculative_draft_len", "thinking_budget",
}  # fmt: skip
_FLOAT_FIELDS = {
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty",
}  # fmt: skip
_BOOL_FIELDS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}

_GRAMMAR_FIELDS = {"json_schema", "regex", "ebnf", "structural_tag"}


def _typed(name: str, value: Any) -> Any:
    """The value as the field's type, or an error that names both."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if name in _INT_FIELDS and value is not None:
        if not is_number or (isinstance(value, float) and not value.is_integer()):
            raise SamplingParamsError(f"{name} must be an integer, got {value!r}")
        return int(value)
    if name in _FLOAT_FIELDS:
        if not is_number or value != value:
            raise SamplingParamsError(f"{name} must be a number, got {value!r}")
        if abs(value) > LARGEST_NUMBER:
            raise SamplingParamsError(f"{name} is out of range, got {value!r}")
        return float(value)
    if name in _BOOL_FIELDS and not isinstance(value, bool):
        raise SamplingParamsError(f"{name} must be true or false, got {value!r}")
    return value


def _one_budget(merged: dict[str, Any]) -> None:
    """vLLM's name of the thinking budget, and SGLang's place for it, are others for ours."""
    custom = merged.get("custom_params")
    if custom is not None:
        merged["custom_params"] = _object("custom_params", custom)
    others = (merged.pop("thinking_token_budget", None), (custom or {}).get("thinking_budget"))
    given = [budget for budget in (merged.get("thinking_budget"), *others) if budget is not None]
    if given:
        merged["thinking_budget"] = None if given[0] == -1 else given[0]


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list | tuple) else None
    if items is None or not all(isinstance(s, str) and s for s in items):
        raise SamplingParamsError(f"{name} must be a non-empty string or a list of them, got {value!r}")
    if any("\ud800" <= char <= "\udfff" for item in items for char in item):
        raise SamplingParamsError(
            f"{name} must be Unicode text, without half a surrogate pair, got {value!r}"
        )
    return items


def _object(name: str, value: Any) -> str:
    try:
        text = json.dumps(value) if isinstance(value, dict) else None
    except (TypeError, ValueError, RecursionError) as error:
        raise SamplingParamsError(f"{name} can't be written as JSON: {error}") from error
    if text is None:
        raise SamplingParamsError(f"{name} must be an object, got {value!r}")
    return text


def _grammar(name: str, value: Any) -> str:
    if name in ("json_schema", "structural_tag") and isinstance(value, dict | bool):
        value = json.dumps(value, ensure_ascii=True)
    if not isinstance(value, str):
        kinds = "text or an object" if name in ("json_schema", "structural_tag") else "text"
        raise SamplingParamsError(f"{name} must be {kinds}, got {value!r}")
    if len(value) > MAX_GRAMMAR_LEN:
        raise SamplingParamsError(f"{name} may have at most {MAX_GRAMMAR_LEN} characters, got {len(value)}")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise SamplingParamsError(f"{name} must be Unicode text, without half a surrogate pair")
    return value


def _ids(name: str, value: Any) -> tuple[int, ...]:
    ok = isinstance(value, list | tuple | set) and all(type(t) is int for t in value)
    if not ok:
        raise SamplingParamsError(f"{name} must be a list of token ids, got {value!r}")
    return tuple(sorted(value))


def _biases(value: Any) -> tuple[tuple[int, float], ...]:
    """``{"token id": bias}`` as JSON has it (keys are strings), or pairs."""
    try:
        pairs = value.items() if isinstance(value, dict) else value
        biases = tuple(sorted((int(token), float(bias)) for token, bias in pairs))
    except (TypeError, ValueError, OverflowError) as error:
        raise SamplingParamsError(f"logit_bias must map token ids to numbers, got {value!r}") from error
    if not all(abs(token) <= LARGEST_INT and abs(bias) <= LARGEST_NUMBER for token, bias in biases):
        raise SamplingParamsError(f"logit_bias holds an id or a number that is too large, or NaN: {value!r}")
    return biases
