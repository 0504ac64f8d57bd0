"""Grammars by llguidance: nothing is compiled ahead, masks are computed as they are needed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import llguidance
from llguidance import LLMatcher, LLTokenizer, StructTag
from llguidance.numpy import fill_next_token_bitmask

from sglang.srt.constrained.grammar import (
    CompiledGrammar,
    GrammarError,
    GrammarKind,
    GrammarSpec,
    JsonOptions,
    Masks,
    Matcher,
    has_fixed_form,
    one_line,
)
from sglang.srt.constrained.structural_tags import read_tags, simple_tags
from sglang.srt.constrained.vocabulary import Vocabulary

_FIXED_JSON: Final[Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class LLGuidanceBackend:
    def __init__(self, vocabulary: Vocabulary, options: JsonOptions) -> None:
        self._stop_ids = frozenset(vocabulary.stop_ids)
        self._json = _json_options(options)
        self._tokenizer = _tokenizer(vocabulary, with_special=False)
        self._tokenizer_with_special = _tokenizer(vocabulary, with_special=True)

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        with_special = spec.kind is GrammarKind.STRUCTURAL_TAG
        tokenizer = self._tokenizer_with_special if with_special else self._tokenizer
        try:
            matcher = LLMatcher(tokenizer, self._grammar(spec), log_level=0)
        except GrammarError:
            raise
        except Exception as error:
            raise GrammarError(f"the {spec.kind.value} can't be used: {one_line(str(error))}") from error
        if matcher.is_error():
            raise GrammarError(f"the {spec.kind.value} can't be used: {one_line(matcher.get_error())}")
        return _Compiled(matcher, self._stop_ids)

    def _grammar(self, spec: GrammarSpec) -> str:
        if spec.kind is GrammarKind.JSON:
            overrides = _FIXED_JSON if has_fixed_form(spec) else self._json
            return LLMatcher.grammar_from_json_schema(spec.text, overrides=overrides)
        if spec.kind is GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(spec.text)
        if spec.kind is GrammarKind.EBNF:
            return llguidance.grammar_from("ebnf", spec.text)
        tags = [
            StructTag(trigger=t.trigger, begin=t.begin, grammar=_schema(t.schema), end=t.end)
            for t in simple_tags(read_tags(spec.text))
        ]
        return StructTag.to_grammar(tags, assume_special=False)


def _json_options(options: JsonOptions) -> Any:
    chosen: dict[str, Any] = {"whitespace_flexible": options.any_whitespace}
    if options.whitespace_pattern is not None:
        chosen["whitespace_pattern"] = options.whitespace_pattern
    return chosen


def _schema(schema: Any) -> dict[str, Any]:
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise GrammarError(f"a structural tag's schema must be an object, got {json.dumps(schema)[:100]}")
    return schema


class _Wrapped:
    """A vocabulary as the library takes it."""

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int, special_token_ids: Sequence[int]) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id
        self.special_token_ids = special_token_ids
        self._of_byte = {text[0]: token for token, text in enumerate(tokens) if len(text) == 1}

    def __call__(self, text: bytes | str) -> list[int]:
        """Any tokens that spell ``text``: the masks don't depend on which."""
        spelled = text.encode() if isinstance(text, str) else text
        return [self._of_byte[byte] for byte in spelled if byte in self._of_byte]


def _tokenizer(vocabulary: Vocabulary, with_special: bool) -> LLTokenizer:
    tokens = vocabulary.spelled(with_special)
    stop_ids = list(vocabulary.stop_ids)
    for token in stop_ids:
        tokens[token] = b"<end %d>" % token  # the library wants names of special tokens
    wrapped = _Wrapped(tokens, stop_ids[0], stop_ids)
    return LLTokenizer(wrapped, eos_token=stop_ids)  # type: ignore[arg-type]  # any object with these fields


class _Compiled:
    num_bytes = 0  # states are made as they are needed, and belong to the matchers

    def __init__(self, fresh: LLMatcher, stop_ids: frozenset[int]) -> None:
        self._fresh = fresh
        self._stop_ids = stop_ids

    def matcher(self) -> Matcher:
        return _Matcher(self._fresh.deep_copy(), self._stop_ids)


class _Matcher:
    """The library calls a text stopped that nothing can follow; here it has ended with its end token."""

    def __init__(self, matcher: LLMatcher, stop_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._stop_ids = stop_ids
        self._ended = False

    @property
    def is_terminated(self) -> bool:
        return self._ended

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._stop_ids:
            self._ended = self._matcher.is_accepting()
            return self._ended
        return self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, count: int) -> None:
        if self._ended and count:
            self._ended = False
            count -= 1
        if count:
            self._matcher.rollback(count)

    def fill(self, masks: Masks, row: int) -> None:
        fill_next_token_bitmask(self._matcher, masks, row)
        if self._matcher.is_error():  # a limit of the library's, reached while it looked
            masks[row] = 0
