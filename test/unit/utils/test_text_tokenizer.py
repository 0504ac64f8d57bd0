"""What can be said of a text without tokenising it. Run alone: pytest THIS_FILE"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import (
    byte_characters,
    write_byte_tokenizer,
    write_fallback_tokenizer,
    write_merged_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers

from sglang.srt.utils.text_tokenizer import TextTokenizer
from sglang.srt.utils.token_codec import FastCodec

PIECES = (
    "é",
    "日本",
    "🙂",
    " the",
    "ing",
    "<|end|>",
    "<think now>",
    "e\u0301",
    "a",
    " ",
    "\n",
    "\ud7a3",
    "\x04",
    "\U00040000",
)
LONG = "x" * 1000


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_folder(write_merged_tokenizer(tmp_path_factory.mktemp("merged")))


@pytest.fixture(scope="module")
def composing(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = write_merged_tokenizer(tmp_path_factory.mktemp("composing"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.normalizer = normalizers.NFC()
    return TextTokenizer(FastCodec(tokenizer), {}, folder)


@pytest.fixture(scope="module")
def lacking(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    """As SmolLM's: without a control code, and without bytes that begin characters."""
    folder = write_merged_tokenizer(tmp_path_factory.mktemp("lacking"))
    return TextTokenizer(FastCodec(without_bytes(folder, b"\x04\xf1\xc0")), {}, Path())


def without_bytes(folder: Path, missing: bytes) -> Tokenizer:
    description = json.loads((folder / "tokenizer.json").read_text())
    for byte in missing:
        del description["model"]["vocab"][byte_characters()[byte]]
    return Tokenizer.from_str(json.dumps(description))


@settings(max_examples=200, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=5), max_size=60))
def test_a_text_never_has_fewer_tokens(
    merged: TextTokenizer, composing: TextTokenizer, lacking: TextTokenizer, pieces: list[str]
) -> None:
    text = "".join(pieces)
    for tokenizer in (merged, composing, lacking):
        assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text))


def test_the_bound_says_something(tmp_path: Path, merged: TextTokenizer, composing: TextTokenizer) -> None:
    assert TextTokenizer.from_folder(write_byte_tokenizer(tmp_path)).least_tokens("x" * 7) == 7
    assert 0 < composing.least_tokens(LONG) < merged.least_tokens(LONG)


def test_characters_that_may_leave_no_token_do_not_count(tmp_path: Path, lacking: TextTokenizer) -> None:
    assert lacking.encode("\x04" * 9) == [] and lacking.least_tokens("\x04" * 9) == 0
    assert lacking.least_tokens(LONG + "\x04" * 9) == lacking.least_tokens(LONG) > 0
    assert lacking.least_tokens("\U00040000" * 1000) == lacking.least_tokens(LONG)  # three bytes of four stay
    inner = TextTokenizer(FastCodec(without_bytes(write_merged_tokenizer(tmp_path), b"\x80")), {}, tmp_path)
    assert inner.least_tokens(LONG) == 0


def test_no_bound_where_a_token_takes_any_number_of_characters(tmp_path: Path) -> None:
    fallback = TextTokenizer.from_folder(write_fallback_tokenizer(tmp_path / "fallback"))
    assert fallback.least_tokens(LONG) == 0
    folder = write_merged_tokenizer(tmp_path / "merged")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<swallow>", rstrip=True)])
    assert TextTokenizer(FastCodec(tokenizer), {}, folder).least_tokens(LONG) == 0
