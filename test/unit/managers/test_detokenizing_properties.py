"""From chosen ids to text, over three kinds of vocabulary. Run alone: pytest THIS_FILE

Byte-level BPE, sentencepiece's kind with byte fallback, and tiktoken's kind (Kimi's files).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.tiny_tiktoken import write_tiny_kimi
from helpers.tiny_tokenizer import write_fallback_tokenizer, write_merged_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.managers.io_struct import FinishReason, RequestStats, TokenBatch, TokenOutput
from sglang.srt.managers.request import Request
from sglang.srt.managers.stop_checker import StopChecker, StopHit
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.text_tokenizer import TextTokenizer

WRITERS: dict[str, Callable[[Path], Path]] = {
    "bpe": write_merged_tokenizer,
    "sentencepiece": write_fallback_tokenizer,
    "tiktoken": write_tiny_kimi,
}
STATS = RequestStats(prompt_tokens=1, completion_tokens=1, cached_tokens=0)
END = FinishReason("length", length=1)
LETTERS = "heloword aé日本🙂 ingTHt👍"
TEXTS = st.text(st.sampled_from(LETTERS), max_size=24)
CUTS = st.lists(st.integers(1, 60), max_size=8)


@pytest.fixture(scope="module", params=WRITERS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_folder(WRITERS[request.param](tmp_path_factory.mktemp(request.param)))


def ids_of(tokenizer: TextTokenizer, text: str) -> list[int]:
    return tokenizer.encode(text if tokenizer.is_byte_level else text.replace(" ", "▁"))


def chunks_of(ids: list[int], cuts: list[int]) -> list[list[int]]:
    ends = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    return [ids[begin:end] for begin, end in pairwise(ends)]


def shown(tokenizer: TextTokenizer, chunks: list[list[int]], **fields: Any) -> list[str]:
    """The text of each chunk, the last one being the request's end."""
    manager = DetokenizerManager(tokenizer)
    pieces = []
    for number, ids in enumerate(chunks, start=1):
        finish = END if number == len(chunks) else None
        output = TokenOutput("a", ids, STATS, finish=finish, **fields)
        pieces.append(manager.handle(TokenBatch([output])).outputs[0].new_text)
    assert manager.num_running == 0
    return pieces


@settings(max_examples=80, deadline=None)
@given(text=TEXTS, cuts=CUTS)
def test_no_character_breaks_and_no_byte_is_lost(
    tokenizer: TextTokenizer, text: str, cuts: list[int]
) -> None:
    ids = ids_of(tokenizer, text)
    pieces = shown(tokenizer, chunks_of(ids, cuts))
    assert "".join(pieces) == tokenizer.decode(ids)
    assert "".join(pieces).lstrip() == text.lstrip()  # sentencepiece's kind drops a first blank
    assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=80, deadline=None)
@given(text=TEXTS, cuts=CUTS, where=st.lists(st.integers(0, 30), max_size=3), skip=st.booleans())
def test_special_tokens_are_shown_or_not(
    tokenizer: TextTokenizer, text: str, cuts: list[int], where: list[int], skip: bool
) -> None:
    """They are between the tokens of a text, and may lie inside a character or a word."""
    special = sorted(tokenizer.special_ids)
    if not special:
        return
    ids = ids_of(tokenizer, text)
    for number, at in enumerate(where):
        ids.insert(min(at, len(ids)), special[number % len(special)])
    pieces = shown(tokenizer, chunks_of(ids, cuts), skip_special_tokens=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip)


def stop_of(
    tokenizer: TextTokenizer, chunks: list[list[int]], stops: tuple[str, ...]
) -> tuple[list[list[int]], StopHit | None]:
    """The chunks as the scheduler sends them on: up to the id at which it ends the request."""
    params = SamplingParams(max_new_tokens=1000, stop=stops)
    checker = StopChecker((), tokenizer.decode_shown)
    sent: list[list[int]] = []
    for chunk in chunks:
        known = [token for one in sent for token in one]
        request = SimpleNamespace(
            ids=known, prompt_len=0, num_outputs=len(known), params=params,
            max_ids=10_000, max_new_tokens=1000, stop_ids=frozenset(),
        )  # fmt: skip
        hit = checker.check(cast(Request, request), chunk)
        sent.append(chunk if hit is None else chunk[: hit.num_kept])
        if hit is not None:
            return sent, hit
    return sent, None


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS,
    cuts=CUTS,
    stops=st.lists(st.text(st.sampled_from(LETTERS.replace(" ", "")), min_size=1, max_size=3), max_size=3),
    inside=st.tuples(st.integers(0, 20), st.integers(1, 4)),
)
def test_stop_strings_across_chunks(
    tokenizer: TextTokenizer, text: str, cuts: list[int], stops: list[str], inside: tuple[int, int]
) -> None:
    """As a decoding id by id in one go has it: everything before the first match, nothing of it or behind."""
    at, size = inside
    wanted = tuple(stop for stop in (*stops, text[at : at + size].strip()) if stop)
    ids = ids_of(tokenizer, text)
    sent, hit = stop_of(tokenizer, chunks_of(ids, cuts), wanted)
    trim = None if hit is None else hit.stop_trim
    pieces = shown(tokenizer, sent, stop=wanted, stop_trim=trim)
    prefixes = (tokenizer.decode_shown(ids[:count]) for count in range(1, len(ids) + 1))
    matched = next((p for p in prefixes if any(stop in p for stop in wanted)), None)
    if matched is None:
        assert "".join(pieces) == tokenizer.decode(ids)
    else:
        assert "".join(pieces) == matched[: min(matched.find(s) for s in wanted if s in matched)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
def test_a_byte_that_stops_among_bytes_of_characters(tokenizer: TextTokenizer, size: int) -> None:
    """Byte fallback spells a line's end and an emoji by byte tokens: a window may cut them anywhere."""
    ids = ids_of(tokenizer, "🙂🙂\n🙂")
    sent, hit = stop_of(tokenizer, chunks_of(ids, list(range(size, len(ids), size))), ("\n",))
    assert hit is not None and hit.stop_trim == "\n"
    assert "".join(shown(tokenizer, sent, stop=("\n",), stop_trim="\n")) == "🙂🙂"
