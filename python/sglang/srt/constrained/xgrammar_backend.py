"""Grammars by xgrammar. Importing the library takes seconds (it imports torch and transformers): make the
backend in a thread that nobody waits for.
"""

from __future__ import annotations

import json
import os
import threading
from typing import Any, Final

import xgrammar

from sglang.srt.constrained.grammar import (
    ANYTHING,
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
from sglang.srt.constrained.structural_tags import read_tags
from sglang.srt.constrained.vocabulary import Vocabulary

_MOST_THREADS: Final = 8


class XGrammarBackend:
    def __init__(self, vocabulary: Vocabulary, options: JsonOptions) -> None:
        """
        Raises:
            GrammarError: an option that xgrammar does not have.
        """
        if options.whitespace_pattern is not None:
            raise GrammarError("--constrained-json-whitespace-pattern needs --grammar-backend llguidance")
        self._vocabulary = vocabulary
        self._options = options
        self._lock = threading.Lock()
        self._infos: dict[bool, Any] = {}
        self._info(with_special=False)  # here, so that no compilation's time is spent on it

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        info = self._info(with_special=spec.kind is GrammarKind.STRUCTURAL_TAG)
        num_threads = min(_MOST_THREADS, max(1, (os.cpu_count() or 1) // 2))
        compiler = xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)
        try:
            return _Compiled(self._compile(compiler, spec))
        except GrammarError:
            raise
        except Exception as error:  # the library has many kinds, RuntimeError among them
            raise GrammarError(f"the {spec.kind.value} can't be used: {one_line(str(error))}") from error

    def _compile(self, compiler: Any, spec: GrammarSpec) -> Any:
        if spec.kind is GrammarKind.JSON:
            any_whitespace = self._options.any_whitespace and not has_fixed_form(spec)
            return compiler.compile_json_schema(spec.text, any_whitespace=any_whitespace)
        if spec.kind is GrammarKind.REGEX:
            return compiler.compile_regex(spec.text)
        if spec.kind is GrammarKind.EBNF:
            return compiler.compile_grammar(spec.text)
        return compiler.compile_structural_tag(json.dumps(read_tags(spec.text)))

    def _info(self, with_special: bool) -> Any:
        with self._lock:
            if with_special not in self._infos:
                vocabulary = self._vocabulary
                self._infos[with_special] = xgrammar.TokenizerInfo(
                    vocabulary.spelled(with_special),
                    xgrammar.VocabType.RAW,
                    vocab_size=len(vocabulary.tokens),
                    stop_token_ids=list(vocabulary.stop_ids),
                )
            return self._infos[with_special]


class _Compiled:
    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self.num_bytes = int(compiled.memory_size_bytes)

    def matcher(self) -> Matcher:
        return _Matcher(xgrammar.GrammarMatcher(self._compiled))


class _Matcher:
    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def accept(self, token: int) -> bool:
        return not self.is_terminated and bool(self._matcher.accept_token(token))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, masks: Masks, row: int) -> None:
        if not self._matcher.fill_next_token_bitmask(masks, row):
            masks[row] = ANYTHING
