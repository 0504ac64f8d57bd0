"""Grammars without a model: masks, compiling, tools, tokenizers. Run alone: ``pytest THIS_FILE``."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.grammar_world import SPECS, byte_vocabulary, compiled, compiler
from helpers.tiny_tokenizer import write_byte_tokenizer, write_fallback_tokenizer, write_merged_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.constrained.backends import backend_maker
from sglang.srt.constrained.compiling import MOST_AT_ONCE, GrammarCompiler
from sglang.srt.constrained.constraint import Constraint
from sglang.srt.constrained.grammar import (
    CompiledGrammar,
    GrammarError,
    GrammarKind,
    GrammarSpec,
    JsonOptions,
    Masks,
    Matcher,
)
from sglang.srt.constrained.rules import NoGrammar, make_rules
from sglang.srt.constrained.structural_tags import read_tags
from sglang.srt.constrained.tools import tools_grammar
from sglang.srt.constrained.vocabulary import Vocabulary, read_vocabulary
from sglang.srt.sampling.sampling_params import ChoiceRules, ReasoningEnd, ThinkingLimit
from sglang.srt.utils.text_tokenizer import TextTokenizer

BACKENDS = ("llguidance", "xgrammar")


def allowed(mask: Masks) -> set[int]:
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.nonzero(bits)[0].tolist())


def masks_of(
    constraint: Constraint, num_outputs: int, tokens: list[int], parents: list[int] | None, max_depth: int
) -> Masks:
    """[N, words], over what was there before."""
    masks = np.full((len(tokens), 8), 5, np.int32)
    constraint.write_masks(masks, num_outputs, tokens, parents, max_depth)
    return masks


def mask_of(matcher: Matcher) -> set[int]:
    masks = np.zeros((1, 8), np.int32)
    matcher.fill(masks, 0)
    return allowed(masks[0])


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """The text is complete: its end may follow."""
    matcher = grammar.matcher()
    return all([matcher.accept(byte) for byte in text.encode()]) and matcher.accept(2)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), spec=st.sampled_from(SPECS), backend=st.sampled_from(BACKENDS))
def test_masks_of_a_tree_are_those_of_each_path_alone(
    data: st.DataObject, spec: GrammarSpec, backend: str
) -> None:
    grammar = compiled(compiler(backend), spec)
    min_new_tokens = data.draw(st.integers(0, 4))
    vocabulary = byte_vocabulary()
    constraint = Constraint(grammar.matcher(), vocabulary, min_new_tokens, vocabulary.stop_ids)
    text: list[int] = []
    for _ in range(data.draw(st.integers(0, 5))):  # some text that the grammar allows
        options = mask_of(_after(grammar, text)) if _has_not_ended(text) else set()
        if options:
            text.append(data.draw(st.sampled_from(sorted(options))))
            assert constraint.advance(text[-1])
    if not _has_not_ended(text):
        assert constraint.is_terminated
        return
    num_nodes = data.draw(st.integers(1, 7))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
    likely = sorted(mask_of(_after(grammar, text))) or [7]
    tokens = [0, *(data.draw(st.sampled_from(likely) | st.integers(0, 255)) for _ in parents[1:])]
    for _ in range(2):  # walking leaves no trace
        masks = masks_of(constraint, len(text), tokens, parents, 9)
        paths: list[list[int] | None] = [text]
        for node in range(1, num_nodes):
            before = paths[parents[node]]
            path = None if before is None or not _has_not_ended(before) else [*before, tokens[node]]
            paths.append(path if path is not None and _after(grammar, path, or_none=True) else None)
        for path, mask in zip(paths, masks, strict=True):
            if path is None or not _has_not_ended(path):
                assert (mask == -1).all()
                continue
            wanted = mask_of(_after(grammar, path))
            if len(path) < min_new_tokens and wanted - set(vocabulary.stop_ids):
                wanted -= set(vocabulary.stop_ids)
            assert allowed(mask) == (wanted or set(range(256)))


def _has_not_ended(text: list[int]) -> bool:
    return not text or text[-1] not in byte_vocabulary().stop_ids


def _after(grammar: CompiledGrammar, text: list[int], or_none: bool = False) -> Any:
    matcher = grammar.matcher()
    taken = all([matcher.accept(token) for token in text])
    assert taken or or_none
    return matcher if taken else None


@pytest.mark.parametrize("begin_id", [None, ord("<")])
def test_reasoning_that_ends_inside_the_drafts(begin_id: int | None) -> None:
    """The nodes before the end are free, those behind it are the grammar's; a chain and its commit agree."""
    grammar = compiled(compiler("llguidance"), SPECS[3])  # three digits
    end = ReasoningEnd("</t>", begin_id)
    drafts = b"\x00" + (b"<" if begin_id else b"hm") + b"</t>12x"
    constraint = Constraint(grammar.matcher(), byte_vocabulary(), reasoning_end=end)
    masks = masks_of(constraint, 0, list(drafts), None, 99)
    digits = set(b"0123456789")
    first = digits | {begin_id} if begin_id else set(range(256))
    wanted = [first, *[set(range(256))] * (len(drafts) - 5), digits, digits, digits, set(range(256))]
    assert [allowed(mask) for mask in masks] == wanted
    for token in drafts[1:-1]:
        assert constraint.advance(token)
    assert not constraint.advance(ord("x")) and not constraint.is_terminated
    assert constraint.advance(ord("3")) and constraint.advance(2) and constraint.is_terminated


def test_a_reply_without_the_reasoning_it_may_have_is_the_grammars() -> None:
    grammar = compiled(compiler("llguidance"), SPECS[3])
    constraint = Constraint(grammar.matcher(), byte_vocabulary(), reasoning_end=ReasoningEnd(">", ord("<")))
    assert not constraint.advance(ord("x"))
    assert all(constraint.advance(token) for token in b"123\x02") and constraint.is_terminated


# ---- what is wrong


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kind, text",
    [
        (GrammarKind.JSON, "nonsense"),
        (GrammarKind.JSON, '{"type": "nothing"}'),
        (GrammarKind.JSON, '{"$ref": "#/$defs/missing"}'),
        (GrammarKind.JSON, '{"items":' * 5000 + "{}" + "}" * 5000),
        (GrammarKind.JSON, '{"items":' * 101 + "{}" + "}" * 101),
        (GrammarKind.REGEX, "[a"),
        (GrammarKind.EBNF, "root ::= missing"),
        (GrammarKind.EBNF, ""),
        (GrammarKind.STRUCTURAL_TAG, "{}"),
        (GrammarKind.STRUCTURAL_TAG, "["),
        (GrammarKind.STRUCTURAL_TAG, '{"structures": [{"begin": "<a>"}], "triggers": ["<b>"]}'),
        (GrammarKind.STRUCTURAL_TAG, '{"structures": [1], "triggers": ["<b>"]}'),
    ],
)
def test_a_wrong_grammar_is_an_error_of_one_line(backend: str, kind: GrammarKind, text: str) -> None:
    found = GrammarCompiler(lambda: compiler(backend)._get_backend())
    compilation = found.compilation(GrammarSpec(kind, text))
    for _ in range(200):
        if not compilation.is_done:
            found.wait(0.1)
    assert compilation.error and len(compilation.error) < 700 and "\n" not in compilation.error


def test_both_forms_of_a_structural_tag() -> None:
    short = {
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f"],
    }
    general = read_tags(json.dumps(short))
    assert read_tags(json.dumps(general)) == general
    for backend in BACKENDS:
        for form in (short, general):
            spec = GrammarSpec(GrammarKind.STRUCTURAL_TAG, json.dumps(form))
            grammar = compiled(compiler(backend), spec)
            assert accepts(grammar, "so <f>12</f> and") and not accepts(grammar, "so <f>x</f>")


# ---- compiling


class SlowBackend:
    """Compiles what it is told to, when it is told to."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.gates: dict[str, threading.Event] = {}

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        self.compiled.append(spec.text)
        if spec.text == "broken":
            raise RuntimeError("a bug of the library")
        assert self.gates.setdefault(spec.text, threading.Event()).wait(20)
        return compiled(compiler("llguidance"), SPECS[3])


def test_what_takes_too_long_is_given_up_and_holds_nobody_up() -> None:
    backend, now = SlowBackend(), [0.0]
    slow = GrammarCompiler(lambda: (backend, byte_vocabulary()), time_limit_s=10, clock=lambda: now[0])
    specs = [GrammarSpec(GrammarKind.REGEX, name) for name in ("a", "b", "c", "broken")]
    stuck = [slow.compilation(spec) for spec in specs[:MOST_AT_ONCE]]
    assert [slow.compilation(spec) for spec in specs[:MOST_AT_ONCE]] == stuck, "the same request again"
    now[0] = 9.0
    behind = slow.compilation(specs[2])
    slow.poll()
    assert not behind.is_done and "c" not in backend.compiled
    now[0] = 10.5
    slow.poll()
    assert all("takes longer than 10 s" in (c.error or "") for c in stuck) and not behind.is_done
    backend.gates.setdefault("c", threading.Event()).set()
    failing = slow.compilation(specs[3])
    while not (behind.is_done and failing.is_done):
        slow.wait(0.1)
    assert behind.compiled is not None and "a bug of the library" in (failing.error or "")
    for name in ("a", "b"):
        backend.gates[name].set()
    assert slow.compilation(specs[2]) is behind and slow.compilation(specs[0]).error, "nothing is done twice"
    assert sorted(backend.compiled) == ["a", "b", "broken", "c"]


def test_a_grammar_that_only_waited_for_slow_ones_may_be_asked_for_again() -> None:
    backend, now = SlowBackend(), [0.0]
    slow = GrammarCompiler(lambda: (backend, byte_vocabulary()), time_limit_s=10, clock=lambda: now[0])
    stuck = [slow.compilation(GrammarSpec(GrammarKind.REGEX, name)) for name in ("a", "b")]
    good = GrammarSpec(GrammarKind.REGEX, "good")
    waiting = slow.compilation(good)
    now[0] = 10.5
    slow.poll()
    assert all(c.error for c in stuck) and "try again later" in (waiting.error or "")
    again = slow.compilation(good)  # the limit counts from its own begin
    now[0] = 20.0
    slow.poll()
    assert again is not waiting and not again.is_done
    for name in ("a", "b", "good"):
        backend.gates.setdefault(name, threading.Event()).set()
    while not again.is_done:
        slow.wait(0.1)
    assert again.compiled is not None and slow.compilation(good) is again


# ---- tokenizers


def _vocabulary(folder: Path, stop_ids: tuple[int, ...] = (2,)) -> tuple[TextTokenizer, Vocabulary]:
    tokenizer = TextTokenizer.from_folder(folder)
    return tokenizer, read_vocabulary(tokenizer, tokenizer.vocab_size + 10, stop_ids)


@pytest.mark.parametrize("write", [write_byte_tokenizer, write_merged_tokenizer, write_fallback_tokenizer])
@settings(max_examples=30, deadline=None)
@given(text=st.text(alphabet="abhelo wrd\té日🙂", min_size=1, max_size=20))
def test_tokens_spell_the_text(tmp_path_factory: pytest.TempPathFactory, write: Any, text: str) -> None:
    folder = write(tmp_path_factory.getbasetemp() / write.__name__)
    tokenizer, vocabulary = _vocabulary(folder)
    text = text.replace("\t", "")
    ids = tokenizer.encode(text.replace(" ", "▁") if write is write_fallback_tokenizer else text)
    spelled = vocabulary.spelled(with_special=False)
    assert b"".join(spelled[token] for token in ids).decode() == text


def test_special_tokens_are_text_for_structural_tags_alone(tmp_path: Path) -> None:
    tokenizer, vocabulary = _vocabulary(write_merged_tokenizer(tmp_path))
    end, other = tokenizer.token_id("<|end|>"), tokenizer.token_id("<think now>")
    assert end is not None and other is not None
    assert vocabulary.spelled(with_special=True)[end] == b"<|end|>"
    assert vocabulary.spelled(with_special=False)[end] == b""
    assert vocabulary.spelled(with_special=False)[other] == b"<think now>"
    assert vocabulary.spelled(with_special=True)[2] == b"", "a token that ends a text is no part of it"
    with pytest.raises(GrammarError, match="end-of-text"):
        read_vocabulary(tokenizer, 300, (999,))


def test_white_space_in_json(tmp_path: Path) -> None:
    folder = write_byte_tokenizer(tmp_path)
    tokenizer = TextTokenizer.from_folder(folder)
    spec = GrammarSpec(GrammarKind.JSON, '{"type": "array", "items": {"type": "integer"}, "minItems": 2}')
    for name, options, texts in (
        ("xgrammar", JsonOptions(), {"[1, 2]": True, "[1,\n2]": True}),
        ("xgrammar", JsonOptions(any_whitespace=False), {"[1, 2]": True, "[1,\n2]": False}),
        ("llguidance", JsonOptions(any_whitespace=False), {"[1,2]": True, "[1, 2]": False}),
        ("llguidance", JsonOptions(" ?"), {"[1, 2]": True, "[1,  2]": False}),
    ):
        backend, _ = backend_maker(name, tokenizer, 256, (2,), options)()
        grammar = backend.compile(spec)
        assert {text: accepts(grammar, text) for text in texts} == texts, (name, options)


# ---- tools

WEATHER = {
    "type": "object",
    "properties": {"place": {"$ref": "#/$defs/Place"}},
    "required": ["place"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "string", "enum": ["Rome", "Oslo"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
CALL = '{"name": "weather", "parameters": {"place": "Rome"}}'
NOW = '{"name": "now", "parameters": {}}'


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_of_tools(backend: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    for choice, parallel, texts in (
        ("required", True, {f"[{CALL}, {NOW}]": True, f"[{NOW}]": True, "[]": False, CALL: False}),
        ("required", False, {f"[{CALL}, {NOW}]": False, f"[{NOW}]": True}),
        (named, True, {f"[{CALL}]": True, f"[{NOW}]": False, f"[{CALL}, {CALL}]": False}),
        ("required", True, {f"[{CALL.replace('Rome', 'Paris')}]": False, '[{"name": "now"}]': False}),
    ):
        spec = tools_grammar(TOOLS, choice, parallel)
        assert spec is not None
        grammar = compiled(compiler(backend), spec)
        assert {text: accepts(grammar, text) for text in texts} == texts
    blank = compiled(compiler(backend), spec).matcher()
    assert not all(blank.accept(byte) for byte in b"[ \n")  # a model could write nothing else, for ever
    assert tools_grammar(TOOLS, "auto") is None and tools_grammar(TOOLS, None) is None


def as_letters(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


@settings(max_examples=80, deadline=None)
@given(data=st.data(), budget=st.integers(0, 4), begin_id=st.sampled_from((None, 97)))
def test_rules_along_a_tree_are_those_of_each_path(
    data: st.DataObject, budget: int, begin_id: int | None
) -> None:
    """However the tokens before came: one by one, or as drafts that were taken back."""
    some = st.sampled_from(b"ab<>")
    words = tuple(data.draw(st.lists(st.tuples(some, some) | st.tuples(some, some, some), max_size=3)))
    given_rules = ChoiceRules(words, ThinkingLimit(budget, ReasoningEnd("<>", begin_id), tuple(b"<>")))

    def fresh(text: list[int]) -> Constraint:
        made = Constraint(NoGrammar(), byte_vocabulary(), rules=make_rules(given_rules, as_letters))
        assert all([made.advance(token) for token in text])
        return made

    text = data.draw(st.lists(some, max_size=7))
    walked = fresh(text)
    num_nodes = data.draw(st.integers(1, 7))
    parents = [-1, *(data.draw(st.integers(0, node - 1)) for node in range(1, num_nodes))]
    tokens = [0, *(data.draw(some) for _ in parents[1:])]
    for _ in range(2):
        masks = masks_of(walked, len(text), tokens, parents, 9)
        paths = [text]
        for node in range(1, num_nodes):
            paths.append([*paths[parents[node]], tokens[node]])
        for path, mask in zip(paths, masks, strict=True):
            assert allowed(mask) == allowed(masks_of(fresh(path), len(path), [0], None, 0)[0])
    thought = text if begin_id is None else text[1:] if text[:1] == [begin_id] else None
    over = bool(text) if thought is None else b"<>" in bytes(thought)
    assert walked.is_over(len(text)) == (over and not words)
    if thought is not None and not over and len(thought) >= budget:
        assert allowed(masks[0]) == {ord(">") if thought[-1:] == [ord("<")] else ord("<")}
