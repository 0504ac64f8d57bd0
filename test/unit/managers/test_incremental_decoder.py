"""Text comes out whole, once, and never the beginning of a stop string. Run alone: pytest THIS_FILE"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.tiny_tokenizer import write_byte_tokenizer, write_fallback_tokenizer, write_merged_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.incremental_decoder import (
    ByteLevelDecoder,
    IncrementalDecoder,
    WindowDecoder,
    piece_decoder,
)
from sglang.srt.utils.text_tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TextTokenizer]:
    writers: dict[str, Callable[[Path], Path]] = {
        "bytes": write_byte_tokenizer,
        "merged": write_merged_tokenizer,
        "fallback": write_fallback_tokenizer,
    }
    return {
        name: TextTokenizer.from_folder(write(tmp_path_factory.mktemp(name)))
        for name, write in writers.items()
    }


def stream(
    tokenizer: TextTokenizer, ids: list[int], cuts: list[int], skip: bool, stop: tuple[str, ...] = ()
) -> str:
    """The text as it comes when ``ids`` arrive in pieces that end at ``cuts``."""
    decoder = IncrementalDecoder(piece_decoder(tokenizer, skip), stop)
    ends = sorted({min(cut, len(ids)) for cut in cuts})
    text, begin = "", 0
    for end in ends:
        piece = decoder.push(ids[begin:end])
        assert "\ufffd" not in piece or "\ufffd" in tokenizer.decode(ids, skip)
        text += piece
        begin = end
    return text + decoder.finish(ids[begin:], None)


def test_the_kind_of_decoder_follows_the_tokenizer(tokenizers: dict[str, TextTokenizer]) -> None:
    assert isinstance(piece_decoder(tokenizers["merged"], True), ByteLevelDecoder)
    assert isinstance(piece_decoder(tokenizers["fallback"], True), WindowDecoder)


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 290), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=10),
    skip=st.booleans(),
)
def test_any_ids_of_a_byte_level_tokenizer(
    tokenizers: dict[str, TextTokenizer], ids: list[int], cuts: list[int], skip: bool
) -> None:
    """Ids outside the vocabulary are among them: models have rows that the tokenizer lacks."""
    for name in ("bytes", "merged"):
        assert stream(tokenizers[name], ids, cuts, skip) == tokenizers[name].decode(ids, skip)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text(st.sampled_from("heloword aé日🙂 "), max_size=20),
    cuts=st.lists(st.integers(0, 60), max_size=10),
)
def test_any_text_of_a_tokenizer_with_byte_fallback(
    tokenizers: dict[str, TextTokenizer], text: str, cuts: list[int]
) -> None:
    tokenizer = tokenizers["fallback"]
    ids = tokenizer.encode(text.replace(" ", "▁"))
    assert stream(tokenizer, ids, cuts, True) == tokenizer.decode(ids)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("ab\n"), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    stop=st.lists(st.text(st.sampled_from("ab\n"), min_size=1, max_size=4), max_size=3),
)
def test_what_is_held_back_is_never_lost(
    tokenizers: dict[str, TextTokenizer], text: str, cuts: list[int], stop: list[str]
) -> None:
    tokenizer = tokenizers["bytes"]
    assert stream(tokenizer, tokenizer.encode(text), cuts, True, tuple(stop)) == text


@settings(max_examples=300, deadline=None)
@given(
    text=st.text(st.sampled_from("ab"), max_size=30),
    cuts=st.lists(st.integers(1, 30), max_size=10),
    stop=st.text(st.sampled_from("ab"), min_size=1, max_size=4),
)
def test_a_stop_string_across_pieces_is_cut(
    tokenizers: dict[str, TextTokenizer], text: str, cuts: list[int], stop: str
) -> None:
    """The scheduler ends the request at the id that completes the first match."""
    tokenizer = tokenizers["bytes"]
    at = text.find(stop)
    if at < 0:
        return
    ids = tokenizer.encode(text[: at + len(stop)])
    decoder = IncrementalDecoder(piece_decoder(tokenizer, True), (stop,))
    ends = sorted({cut for cut in cuts if cut < len(ids)})
    pieces = [decoder.push(ids[a:b]) for a, b in zip([0, *ends], ends, strict=False)]
    begin = ends[-1] if ends else 0
    assert "".join(pieces) + decoder.finish(ids[begin:], stop) == text[:at]


def test_a_match_before_min_new_tokens_is_text(tokenizers: dict[str, TextTokenizer]) -> None:
    """The scheduler lets it pass, so the cut is at the last one."""
    tokenizer = tokenizers["bytes"]
    decoder = IncrementalDecoder(piece_decoder(tokenizer, True), ("END",))
    assert decoder.finish(tokenizer.encode("one END two END"), "END") == "one END two "


def test_one_token_may_hold_a_stop_string_and_more(tokenizers: dict[str, TextTokenizer]) -> None:
    tokenizer = tokenizers["merged"]
    ids = [*tokenizer.encode("a"), *tokenizer.encode(" the")]
    assert len(ids) == 2
    decoder = IncrementalDecoder(piece_decoder(tokenizer, True), ("t",))
    assert decoder.finish(ids, "t") == "a "


def test_a_character_in_pieces_comes_whole(tokenizers: dict[str, TextTokenizer]) -> None:
    decoder = IncrementalDecoder(piece_decoder(tokenizers["bytes"], True))
    assert [decoder.push([byte]) for byte in "🙂é".encode()] == ["", "", "", "🙂", "", "é"]
