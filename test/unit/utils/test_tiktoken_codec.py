"""Kimi's vocabulary without its code: ids, bytes, special tokens, refusals. Run alone: pytest THIS_FILE

The oracle is the algorithm written out: the pattern by another library, byte pairs merged one by one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import regex
from helpers.tiny_tiktoken import NAMES, TEXT, write_tiny_kimi
from helpers.tiny_tokenizer import write_byte_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.incremental_decoder import ByteLevelDecoder, IncrementalDecoder, piece_decoder
from sglang.srt.utils.text_tokenizer import TextTokenizer, TokenizerError
from sglang.srt.utils.tiktoken_codec import SPLIT_RULES, split_runs

PIECES = st.sampled_from(
    [
        *TEXT.split(" "),
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "<|im_end|>",
        "<think>",
        "[BOS]",
        "中文",
        "x中y",
        "'ll",
        "’s",
    ]
)
TEXTS = st.lists(PIECES | st.text(max_size=4), max_size=30).map("".join)


@pytest.fixture(scope="module")
def kimi(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_folder(write_tiny_kimi(tmp_path_factory.mktemp("kimi")))


@pytest.fixture(scope="module")
def ranks(kimi: TextTokenizer) -> dict[bytes, int]:
    return {kimi.token_bytes(i): i for i in range(kimi.vocab_size - 256)}


def special(kimi: TextTokenizer, name: str) -> int:
    number = kimi.token_id(name)
    assert number is not None
    return number


def merged(word: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Of the neighbours that make a token together, those with the lowest rank, the first of them."""
    parts = [bytes([byte]) for byte in word]
    while True:
        pairs = [
            (ranks[a + b], at)
            for at, (a, b) in enumerate(zip(parts, parts[1:], strict=False))
            if a + b in ranks
        ]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def encoded(text: str, kimi: TextTokenizer, ranks: dict[bytes, int]) -> list[int]:
    names = [*NAMES.values(), *(f"<|reserved_token_{i}|>" for i in range(len(ranks), kimi.vocab_size))]
    ids: list[int] = []
    for part in regex.split(f"({'|'.join(map(regex.escape, names))})", text):
        if part in names and kimi.token_id(part) is not None:
            ids.append(special(kimi, part))
            continue
        for word in regex.findall("|".join(SPLIT_RULES), part, regex.VERSION1):
            ids += merged(word.encode(), ranks)
    return ids


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_ids_are_those_of_the_algorithm(kimi: TextTokenizer, ranks: dict[bytes, int], text: str) -> None:
    assert kimi.encode(text) == encoded(text, kimi, ranks)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_there_and_back(kimi: TextTokenizer, text: str) -> None:
    ids = kimi.encode(text)
    assert kimi.decode(ids, skip_special_tokens=False) == text
    assert kimi.least_tokens(text) <= len(ids)
    shown = text
    for name in ("<|im_end|>", "[BOS]"):
        shown = shown.replace(name, "")
    assert kimi.decode(ids) == shown or set(shown) & set("[<")


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 700), max_size=40), cut=st.integers(0, 40), skip=st.booleans())
def test_text_comes_out_whole(kimi: TextTokenizer, ids: list[int], cut: int, skip: bool) -> None:
    pieces = piece_decoder(kimi, skip)
    assert isinstance(pieces, ByteLevelDecoder)
    decoder = IncrementalDecoder(pieces)
    assert decoder.push(ids[:cut]) + decoder.finish(ids[cut:], None) == kimi.decode(ids, skip)


def test_words_are_split_as_kimis_are(kimi: TextTokenizer) -> None:
    """Chinese is apart from Latin letters, and digits come in threes."""
    pieces = [kimi.decode([i]) for i in kimi.encode("中文English1234")]
    ends = {len("".join(pieces[: n + 1])) for n in range(len(pieces))}
    assert {len("中文"), len("中文English"), len("中文English123")} <= ends


def test_special_tokens(kimi: TextTokenizer) -> None:
    end, think = special(kimi, "<|im_end|>"), special(kimi, "<think>")
    assert end == kimi.vocab_size - 256 + 2
    assert kimi.encode("a<|im_end|><think>")[-2:] == [end, think]
    assert kimi.decode(kimi.encode("a<|im_end|><think>b")) == "a<think>b"  # one is flagged, the other is text
    reserved = f"<|reserved_token_{kimi.vocab_size - 256 + 100}|>"
    assert kimi.encode(reserved) == [kimi.vocab_size - 256 + 100]
    assert kimi.token_bytes(kimi.vocab_size) == b"" and kimi.token_id("no such token") is None


def test_what_ends_a_reply(kimi: TextTokenizer, tmp_path: Path) -> None:
    """What the model's files say, the tokenizer's eos_token, and Kimi's end of a turn, whatever these say."""
    ends = (special(kimi, "[EOS]"), special(kimi, "<|im_end|>"))
    assert kimi.stop_ids(()) == ends
    assert kimi.stop_ids((ends[1], 7)) == (ends[1], 7, ends[0])
    fast = write_byte_tokenizer(tmp_path)
    assert TextTokenizer.from_folder(fast).stop_ids((1, 2, 3)) == (1, 2, 3)
    (fast / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "A"}}))
    assert TextTokenizer.from_folder(fast).stop_ids((1, 2, 3)) == (1, 2, 3, ord("A"))


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.sampled_from("ab \n\u3000"), max_size=60), most=st.integers(1, 5))
def test_long_runs_are_cut(text: str, most: int) -> None:
    parts = list(split_runs(text, most))
    assert "".join(parts) == text and all(parts)
    for part in parts:
        assert all(len(run) <= most for run in regex.findall(r"\s+|\S+", part))
    for left, right in zip(parts, parts[1:], strict=False):  # nowhere else
        assert left[-1].isspace() == right[0].isspace() == all(c.isspace() for c in left[-most:])


def test_a_long_text_is_cut_where_the_code_cuts_it(kimi: TextTokenizer) -> None:
    run = "the" * 9000
    assert kimi.encode(run) == kimi.encode(run[:25_000]) + kimi.encode(run[25_000:])


def code(rules: tuple[str, ...]) -> str:
    begin = "raise SystemExit('this must never run')\nclass TikTokenTokenizer:\n"
    return f"{begin}    pat_str = '|'.join({list(rules)!r})\n"


def test_the_code_beside_it_is_compared_and_never_run(tmp_path: Path) -> None:
    folder = write_tiny_kimi(tmp_path)
    (folder / "tokenization_kimi.py").write_text(code(SPLIT_RULES))
    TextTokenizer.from_folder(folder)
    (folder / "tokenization_kimi.py").write_text(code((*SPLIT_RULES[:3], r"\p{N}", *SPLIT_RULES[4:])))
    with pytest.raises(TokenizerError, match="splits text by other rules"):
        TextTokenizer.from_folder(folder)


WRONG = {
    "another class": (
        {"auto_map": {"AutoTokenizer": ["tokenization_x.OtherTokenizer", None]}},
        None,
        "read by OtherTokenizer",
    ),
    "no class": ({"auto_map": None, "tokenizer_class": None}, None, "only TikTokenTokenizer is known"),
    "an id that is no special one": (
        {"added_tokens_decoder": {"5": {"content": "<x>"}}},
        None,
        "'<x>' has id 5",
    ),
    "not base64": ({}, b"!!! 0\n", "line 1 of tiktoken.model"),
    "a rank that is missing": ({}, b"YQ== 1\n", "not 0 to 0"),
    "a byte that is missing": ({}, b"YQ== 0\n", "no token for byte 0"),
}


@pytest.mark.parametrize("what", WRONG)
def test_refused(tmp_path: Path, what: str) -> None:
    config, vocabulary, words = WRONG[what]
    folder = write_tiny_kimi(tmp_path, 3, **config)
    if vocabulary is not None:
        (folder / "tiktoken.model").write_bytes(vocabulary)
    with pytest.raises(TokenizerError, match=words) as caught:
        TextTokenizer.from_folder(folder)
    assert "\n" not in str(caught.value) and str(folder) in str(caught.value)


def test_code_that_is_not_known_is_named(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["someone/repo--tokenization_x.XTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TokenizerError, match=r"is code \(tokenization_x.XTokenizer\).*--tokenizer-path"):
        TextTokenizer.from_folder(tmp_path)


def test_the_package_is_named_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny_kimi(tmp_path, 3)
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(TokenizerError, match="pip install tiktoken"):
        TextTokenizer.from_folder(folder)
